//! What both command lines share.

pub mod go_values;
