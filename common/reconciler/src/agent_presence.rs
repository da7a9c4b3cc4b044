//! Presence of a member's agents, and the proxy's role that follows from it.

use std::time::Duration;

use krypton_runtime::clock::BootTime;
use krypton_runtime::lease::NO_NEW_RUNS_AFTER;

/// Silence of an agent after which its member is Unknown.
pub const SILENCE: Duration = Duration::from_secs(30);

/// Presence of a member's agents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Presence {
    /// No agent was ever enrolled.
    #[default]
    Never,
    /// An agent reconciles or can start immediately.
    Ready,
    /// An agent was present until this time.
    Away(BootTime),
}

impl Presence {
    /// Returns the presence after a change in readiness. `able` is the last time at which an agent could act. It may be
    /// well before the hub notices the agent's silence.
    #[must_use]
    pub fn next(self, ready: bool, able: BootTime) -> Self {
        match (ready, self) {
            (true, _) => Self::Ready,
            (false, Self::Ready) => Self::Away(able),
            (false, presence) => presence,
        }
    }

    /// Returns the time at which an agent could last act, if it reports at `reported_at` that its API server does not
    /// respond. An agent reports that only after this delay.
    #[must_use]
    pub fn able_before(reported_at: BootTime) -> BootTime {
        BootTime(reported_at.0.saturating_sub(NO_NEW_RUNS_AFTER))
    }
}

/// Role of the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyRole {
    /// An agent reconciles, is about to, or did a moment ago.
    Idle,
    /// The agent has been away for a while. It may be running and only disconnected from the hub.
    Observe,
    Act,
}

/// Returns the role, and the time of the next check if nothing changes.
pub fn proxy_role(
    presence: Presence,
    grace: Duration,
    now: BootTime,
) -> (ProxyRole, Option<BootTime>) {
    match presence {
        Presence::Never => (ProxyRole::Act, None),
        Presence::Ready => (ProxyRole::Idle, None),
        Presence::Away(since) => {
            let at = |pause: Duration| Some(since + pause);
            // A session that reconnects within seconds changes nothing.
            match now.since(since) {
                away if away >= grace => (ProxyRole::Act, None),
                away if away >= SILENCE => (ProxyRole::Observe, at(grace)),
                _ => (ProxyRole::Idle, at(grace.min(SILENCE))),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_acts_only_without_agent_or_after_grace() {
        let at = |seconds| BootTime(Duration::from_secs(seconds));
        let grace = Duration::from_secs(60);
        let cases = [
            (Presence::Never, (ProxyRole::Act, None)),
            (Presence::Ready, (ProxyRole::Idle, None)),
            (Presence::Away(at(100)), (ProxyRole::Idle, Some(at(130)))),
            (Presence::Away(at(71)), (ProxyRole::Idle, Some(at(101)))),
            (Presence::Away(at(70)), (ProxyRole::Observe, Some(at(130)))),
            (Presence::Away(at(41)), (ProxyRole::Observe, Some(at(101)))),
            (Presence::Away(at(40)), (ProxyRole::Act, None)),
        ];
        let short = Duration::from_secs(5);
        assert_eq!(
            proxy_role(Presence::Away(at(96)), short, at(100)),
            (ProxyRole::Idle, Some(at(101)))
        );
        for (presence, expected) in cases {
            assert_eq!(
                proxy_role(presence, grace, at(100)),
                expected,
                "{presence:?}"
            );
        }
    }
}
