//! Setting that selects where an agent gets charts: from the repository, the hub, or both.

use std::fmt;
use std::str::FromStr;

/// Source of an agent's charts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChartSource {
    /// The repository, or the hub if the repository is unreachable.
    #[default]
    Auto,
    /// The repository only.
    Direct,
    /// The hub only.
    Hub,
}

impl FromStr for ChartSource {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "direct" => Ok(Self::Direct),
            "hub" => Ok(Self::Hub),
            _ => Err("write auto, direct or hub"),
        }
    }
}

impl fmt::Display for ChartSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Direct => "direct",
            Self::Hub => "hub",
        })
    }
}
