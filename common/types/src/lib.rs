//! The words of the domain, as plain values: names, keys, the desired state, reports, conditions, identities, and the
//! documents that hub, agent and kubectl exchange.
//!
//! It knows no clock, file, process or Kubernetes client, and imports `krypton-crds` alone.

pub mod allowed_namespaces;
pub mod ca_rotation;
pub mod conditions;
pub mod deployment;
pub mod desired;
pub mod error_chain;
pub mod fingerprint;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod join_bundle;
pub mod join_info;
pub mod join_token;
mod keyword;
pub mod kubeconfig;
pub mod member;
pub mod names;
pub mod placed_tenant;
pub mod redact;
pub mod report_digest;
pub mod root_digest;
pub mod spiffe;
pub mod tenant;
pub mod values;
