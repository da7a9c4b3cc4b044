//! `kubectl krypton migrate` at a real apiserver.
