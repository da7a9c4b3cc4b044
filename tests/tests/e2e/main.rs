//! End-to-end tests of user-visible behavior on real control planes.
//!
//! All files form one program. It is linked once, and all tests share the machine until the end. With one program for
//! each file, cores would be idle during the last test of each file.

#![allow(
    clippy::unwrap_used,
    reason = "tests only, their helping functions included"
)]

mod aggregation;
mod anchor;
mod apis;
mod attacks;
mod chart_crds;
mod chart_life;
mod chart_rights;
mod charts;
mod cluster_profile;
mod conformance;
mod deletion;
mod deployments;
mod docs;
mod docs_commands;
mod doubt;
mod drift;
mod enrollment;
mod expiry;
mod explain;
mod fleet;
mod handling;
mod handover;
mod harness;
mod helm_away;
mod helm_model;
mod hostile_server;
mod in_a_pod;
mod input;
mod install;
mod joining;
mod krypton_deployment;
mod kubectl;
mod lead;
mod leader_label;
mod leaks;
mod leftovers;
mod lockdown;
mod logs;
mod member_sources;
mod members;
mod metrics;
mod moving_over;
mod occupied;
mod one_writer;
mod packaging;
mod placed;
mod power;
mod quickstart;
mod readiness;
mod rebuilt;
mod refusals;
mod release_secrets;
mod remediation;
mod repair;
mod simulated_home;
mod slots;
mod tampering;
mod traces;
mod upgrade;
mod values;
mod workspaces;
