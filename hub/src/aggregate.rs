//! Reports of all members in, the status of home's Tenants out. On home nobody else writes it
//! (design §3, rule 10).

mod concerns;
mod decision;
mod form;
mod keep;
mod listing;
mod placement;
mod placing;
mod rehearsal;
mod reports;

pub use decision::Rules;
pub use keep::run;
pub use rehearsal::Rehearsal;
pub use reports::{Changed, Counts, Hearing, Reports, Retired, TENANTS_MAX, Target, Targets};

#[cfg(test)]
mod tests;
