"""Learns what libraries take on a GPU: run by the interpreter that has torch, never imported by CARMA."""
