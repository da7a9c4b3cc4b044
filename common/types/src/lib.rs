//! Domain types as plain values: names, keys, the desired state, reports, conditions and identities. Also defines the
//! documents that hub, agent and kubectl exchange.
//!
//! This crate uses no clock, file, process or Kubernetes client. Its only internal dependency is `krypton-crds`.

pub mod allowed_namespaces;
pub mod ca_rotation;
pub mod conditions;
pub mod deployment;
pub mod desired;
pub mod document;
pub mod error_chain;
pub mod fingerprint;
pub mod fleet_tenants;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod join_bundle;
pub mod join_info;
pub mod join_token;
pub mod keyword;
pub mod kubeconfig;
pub mod labels;
pub mod loopback;
pub mod member;
pub mod names;
pub mod placed_tenant;
pub mod redact;
pub mod report_digest;
pub mod root_digest;
pub mod spiffe;
pub mod tenant;
pub mod text;
pub mod validity;
pub mod values;
