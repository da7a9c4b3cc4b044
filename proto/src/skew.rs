//! Checks the compatibility of hub and agent versions. A hub of minor version N serves agents of N-2 to N+1, and both
//! must share a revision of the protocol. Pure.

use std::ops::RangeInclusive;

use semver::Version;
use thiserror::Error;

/// Protocol revisions that this version supports.
pub const PROTOCOL: RangeInclusive<u32> = 1..=1;
/// Maximum number of minor versions that an agent may be behind its hub.
const MINOR_VERSIONS_BEHIND: u64 = 2;
/// Maximum number of minor versions that an agent may be ahead of its hub.
const MINOR_VERSIONS_AHEAD: u64 = 1;

/// Reason why two versions are incompatible. The message contains the fix.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SkewError {
    #[error(
        "the agent supports protocol {}, but the hub supports {}; install an agent of the hub's version {hub}",
        revisions(.agent), revisions(&PROTOCOL)
    )]
    Protocol {
        agent: RangeInclusive<u32>,
        hub: String,
    },
    #[error(
        "agent {agent} is too old for hub {hub}, which serves agents of {MINOR_VERSIONS_BEHIND} minor versions before its own to {MINOR_VERSIONS_AHEAD} after it; upgrade the agent"
    )]
    TooOld { agent: String, hub: String },
    #[error(
        "agent {agent} is too new for hub {hub}, which serves agents of {MINOR_VERSIONS_BEHIND} minor versions before its own to {MINOR_VERSIONS_AHEAD} after it; upgrade the hub first"
    )]
    TooNew { agent: String, hub: String },
    #[error("the agent's version {0:?} is not SemVer; install a released agent")]
    NotSemVer(String),
}

fn revisions(range: &RangeInclusive<u32>) -> String {
    match (range.start(), range.end()) {
        (first, last) if first == last => first.to_string(),
        (first, last) => format!("{first} to {last}"),
    }
}

/// Returns the newest protocol revision that both versions support.
pub fn negotiate(
    agent: RangeInclusive<u32>,
    agent_version: &str,
    hub_version: &str,
) -> Result<u32, SkewError> {
    let truncated = || agent_version.chars().take(64).collect::<String>();
    let (Ok(agent_semver), Ok(hub_semver)) =
        (Version::parse(agent_version), Version::parse(hub_version))
    else {
        return Err(SkewError::NotSemVer(truncated()));
    };
    let hub = hub_version.to_owned();
    let minor =
        |version: &Version, later: u64| (version.major, version.minor.saturating_add(later));
    if minor(&agent_semver, MINOR_VERSIONS_BEHIND) < minor(&hub_semver, 0) {
        let agent = truncated();
        return Err(SkewError::TooOld { agent, hub });
    }
    if minor(&agent_semver, 0) > minor(&hub_semver, MINOR_VERSIONS_AHEAD) {
        let agent = truncated();
        return Err(SkewError::TooNew { agent, hub });
    }
    let common = *agent.end().min(PROTOCOL.end());
    if common < *agent.start().max(PROTOCOL.start()) {
        return Err(SkewError::Protocol { agent, hub });
    }
    Ok(common)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_accepts_two_older_and_one_newer_minor() {
        let cases = [
            ("1.3.9", Err("too old")),
            ("1.4.0", Ok(())),
            ("1.6.2", Ok(())),
            ("1.7.0-rc.1", Ok(())),
            ("1.8.0", Err("too new")),
            ("0.6.0", Err("too old")),
            ("2.6.0", Err("too new")),
            ("latest", Err("not SemVer")),
            ("", Err("not SemVer")),
        ];
        for (agent, expected) in cases {
            let result = negotiate(PROTOCOL, agent, "1.6.0");
            match expected {
                Ok(()) => assert_eq!(result, Ok(*PROTOCOL.end()), "{agent}"),
                Err(text) => {
                    let error = result.unwrap_err().to_string();
                    assert!(error.contains(text), "{agent}: {error}");
                }
            }
        }
    }

    #[test]
    fn newest_common_revision_is_used_otherwise_rejected() {
        let newest = *PROTOCOL.end();
        let wide = *PROTOCOL.start()..=newest + 5;
        assert_eq!(negotiate(wide, "1.0.0", "1.0.0"), Ok(newest));
        let error = negotiate(newest + 1..=newest + 2, "1.0.0", "1.0.0")
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("2 to 3") && error.contains("supports 1;"),
            "{error}"
        );
        assert!(negotiate(0..=0, "1.0.0", "1.0.0").is_err());
    }
}
