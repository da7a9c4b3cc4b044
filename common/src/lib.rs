//! The domain's words, without I/O.

pub mod conditions;
pub mod desired;
pub mod error_chain;
pub mod fingerprint;
pub mod kubeconfig;
pub mod names;
pub mod telemetry;
pub mod tenant;
