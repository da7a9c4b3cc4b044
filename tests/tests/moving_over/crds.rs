//! The original's CRDs, each of them, under objects that are stored: ours takes their place, and what was stored
//! is read as it was.
