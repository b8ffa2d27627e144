"""What ``gpuserve doctor`` knows: facts about this machine, gathered in one place and judged in another."""
