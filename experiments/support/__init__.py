"""What all rooms of the experiments use: settings sections, folders, files, progress, the hub. Imports none of them."""
