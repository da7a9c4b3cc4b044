//! Runs the real hub and agents in one process against simulated API servers, Helm, network and time, under faults
//! that a seed determines.
//!
//! Each simulated process has its own paused runtime. The conductor runs one of them at a time, up to the instant of
//! the next event. Nothing here decides the actions of the product.

pub mod batch;
pub mod chart;
pub mod conductor;
pub mod coverage;
pub mod faults;
pub mod helm;
mod hostile;
pub mod log;
pub mod network;
mod object;
pub mod observe;
pub mod oracles;
pub mod outbox;
pub mod plan;
mod process;
pub mod process_network;
pub mod run;
pub mod shrink;
pub mod stage;
pub mod time;
mod transport;
pub mod user_client;
pub mod walk;
mod world;
