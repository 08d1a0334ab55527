from fastlayers.cli import main

main(prog_name="python -m fastlayers")
