"""What training has come to, as generations: their contents, files and copies in memory."""
