//! The domain's words, without I/O.

pub mod account;
pub mod allowed;
pub mod bundle;
pub mod conditions;
pub mod crd_policy;
pub mod deployment;
pub mod desired;
pub mod drift;
pub mod error_chain;
pub mod fingerprint;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod handling;
pub mod kubeconfig;
pub mod lockdown;
pub mod member;
pub mod names;
pub mod namespaces;
pub mod placed;
pub mod redact;
pub mod root_digest;
pub mod spiffe;
pub mod telemetry;
pub mod tenant;
pub mod tls;
pub mod values;
mod words;
