"""What runs inside a box. It imports the standard library only, and itself by relative imports,
since the box sees this folder alone, as the package `inside`.
"""
