"""The data that learned estimators are made from: training runs drawn by chance, and what each took on a GPU."""
