//! Names a chart: its repository, its name and its version.

use std::fmt;

use krypton_types::redact::url_shown;

/// Reference to a chart.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct ChartRef {
    /// URL of the repository: `http`, `https` or `oci`. Empty if `name` is the path of a local `.tgz` or a
    /// complete `oci` URL.
    pub repo: String,
    pub name: String,
    /// Exact SemVer 2 version with an optional leading `v` and an optional digest: `1.2.3@sha256:…`. Empty
    /// means the newest stable version. `ChartCache::resolve` accepts a range; a fetch does not.
    pub version: String,
}

impl ChartRef {
    /// Returns the repository's URL for display: without user, password and query, because a query may
    /// contain a key.
    pub fn repo_shown(&self) -> String {
        url_shown(&self.repo)
    }

    /// Returns the name for display. If the name is a URL, removes user, password and query.
    pub fn name_shown(&self) -> String {
        match self.name.contains("://") {
            true => url_shown(&self.name),
            false => self.name.clone(),
        }
    }
}

impl fmt::Display for ChartRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // An exact version that is not verified yet is a range.
        let version = self.version.strip_prefix('=').unwrap_or(&self.version);
        let short: String = version.chars().take(64).collect();
        match (self.name_shown(), short.as_str()) {
            (name, "") => write!(f, "chart {name}, newest version")?,
            (name, version) => write!(f, "chart {name}, version {}", version.escape_debug())?,
        }
        if self.repo.is_empty() {
            Ok(())
        } else {
            write!(f, ", of {}", self.repo_shown())
        }
    }
}

impl fmt::Debug for ChartRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChartRef({self})")
    }
}
