//! Setting that selects where an agent gets charts: from the repository, the hub, or both.

use krypton_types::by_word;

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

impl ChartSource {
    /// All sources with their text.
    const ALL: [(&'static str, Self); 3] = [
        ("auto", Self::Auto),
        ("direct", Self::Direct),
        ("hub", Self::Hub),
    ];
}

by_word!(ChartSource);
