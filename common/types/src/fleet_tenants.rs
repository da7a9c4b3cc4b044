//! The Tenants that the members have reported, in pages. The hub serves them at its debug port, and kubectl reads them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::tenant::{TenantKey, TenantReport};

/// Path at the debug port.
pub const PATH: &str = "/debug/tenants.json";
/// Most Tenants on a page.
pub const PAGE_MAX: usize = 1_000;

/// A Tenant on one member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FleetTenant {
    pub member: String,
    #[serde(flatten)]
    pub key: TenantKey,
    pub report: TenantReport,
}

/// Tenants in the order of [`Position`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Page {
    pub tenants: Vec<FleetTenant>,
    /// The last position on this page. `None` if no page follows.
    pub next: Option<String>,
}

/// Place in the order of all members and their Tenants. Its text is `MEMBER/NAMESPACE/NAME`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    pub member: String,
    pub key: TenantKey,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.member, self.key)
    }
}

impl FromStr for Position {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.split('/').map(str::to_owned);
        let position = (|| {
            let (member, namespace, name) = (parts.next()?, parts.next()?, parts.next()?);
            let key = TenantKey { namespace, name };
            Some(Self { member, key })
        })();
        let position = position.filter(|_| parts.next().is_none());
        position.ok_or("a position is MEMBER/NAMESPACE/NAME")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_round_trips_and_rejects_other_texts() {
        let position: Position = "edge-1/default/acme".parse().unwrap();
        assert_eq!(position.key.name, "acme");
        assert_eq!(position.to_string(), "edge-1/default/acme");
        for text in ["", "edge-1", "edge-1/default", "a/b/c/d"] {
            assert!(text.parse::<Position>().is_err(), "{text}");
        }
    }
}
