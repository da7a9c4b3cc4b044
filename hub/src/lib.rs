//! The hub: discovery, fleet, desired state, proxies and status of the home cluster, and the port that
//! agents join and connect by.
//!
//! Modules depend one way: `hub` → `fleet`, `aggregate` → `proxy`, `identity`, `facts` → `discovery`,
//! `home`, `settings`; `hub` → `enrolment` → `listener`, `join_token` → `authority`.

pub mod admin;
pub mod aggregate;
pub mod authority;
pub mod desired;
pub mod discovery;
pub mod enrolment;
pub mod facts;
pub mod fleet;
pub mod found;
pub mod home;
pub mod hub;
pub mod identity;
pub mod join_info;
pub mod join_token;
pub mod kubectl;
pub mod listener;
pub mod metrics;
pub mod proxy;
pub mod settings;
pub mod values_file;
