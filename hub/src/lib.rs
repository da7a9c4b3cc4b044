//! The hub: discovery, fleet, desired state, proxies and status of the home cluster, and the port that
//! agents join and connect by.
//!
//! Modules depend one way: `hub` → `fleet`, `gateway`, `aggregate` → `proxy`, `fleet_service` → `session`
//! → `members`, `voices` → `identity`, `facts` → `discovery`, `home`, `settings`; `gateway` → `listener`,
//! `enrolment`, `rotation` → `authority`, `join_token`; `listener`, `members` → `bucket`; all that write on home or serve agents → `lead`; `facts` → `expiry` →
//! `authority`.

pub mod agent_keys;
pub mod aggregate;
pub mod authority;
pub mod bucket;
pub mod carried;
pub mod chart_credentials;
pub mod chart_pin;
pub mod chart_values;
pub mod deployment;
pub mod deployments;
pub mod desired;
pub mod discovery;
pub mod dump;
pub mod enrolment;
pub mod expiry;
pub mod facts;
pub mod failpoint;
pub mod fleet;
pub mod fleet_service;
pub mod found;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod gateway;
pub mod home;
pub mod hub;
pub mod identity;
pub mod join_info;
pub mod join_token;
pub mod kubectl;
pub mod lead;
pub mod listener;
pub mod member_metrics;
pub mod members;
pub mod metrics;
pub mod notices;
pub mod placements;
pub mod proxy;
pub mod rotation;
pub mod session;
pub mod settings;
pub mod tasks;
pub mod values_file;
pub mod voices;
