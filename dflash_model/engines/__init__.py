"""Serving engines that are asked for references: who they are, what they are asked, what their answers must hold."""
