//! Runs Helm, fetches and checks charts, and reads the Secrets that Helm keeps of a release.
//!
//! It knows no Tenant, no Lease and no desired state, and not who calls it. It imports `krypton-runtime` and
//! `krypton-types`.

pub mod chart;
pub mod driver;
pub mod dump;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod metrics;
pub mod releases;
pub mod slots;
