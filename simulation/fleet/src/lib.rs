//! Runs the real hub and agents in one process against simulated API servers, Helm, network and time, under faults
//! that a seed determines.
