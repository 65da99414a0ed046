"""Figures, reports and the explorer: everything that reads run directories."""
