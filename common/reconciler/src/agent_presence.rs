//! Whether a member has an agent, and what the hub's proxy does then.

use std::time::Duration;

use krypton_runtime::clock::BootTime;
use krypton_runtime::lease::NO_NEW_RUNS_AFTER;

/// A member whose agent has not been heard for this long is Unknown.
pub const SILENCE: Duration = Duration::from_secs(30);

/// Whether a member has an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// None was ever enrolled.
    Never,
    /// One could reconcile at once, or does.
    Ready,
    /// There was one, until then.
    Away(BootTime),
}

impl Presence {
    /// What follows when one of its agents is ready, or none; the last that was is known to have been able
    /// to act at `able`, which may be a while before its silence is noticed.
    #[must_use]
    pub fn next(self, ready: bool, able: BootTime) -> Self {
        match (ready, self) {
            (true, _) => Self::Ready,
            (false, Self::Ready) => Self::Away(able),
            (false, before) => before,
        }
    }

    /// When an agent was able to act that was heard to be at `heard`, and has now said that its apiserver
    /// does not answer it: it waits for so long before it does.
    #[must_use]
    pub fn able_before(heard: BootTime) -> BootTime {
        BootTime(heard.0.saturating_sub(NO_NEW_RUNS_AFTER))
    }
}

/// What the proxy does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// An agent reconciles, or is about to, or has been until a moment ago.
    Rest,
    /// The agent has been away for a while: it may live and be cut off from us only.
    Observe,
    Act,
}

/// What to do, and when to look again though nothing has happened.
pub fn role(presence: Presence, grace: Duration, now: BootTime) -> (Role, Option<BootTime>) {
    match presence {
        Presence::Never => (Role::Act, None),
        Presence::Ready => (Role::Rest, None),
        Presence::Away(since) => {
            let after = |pause| Some(BootTime(since.0 + pause));
            // A session that is made anew within seconds is none of our business.
            match now.since(since) {
                away if away >= grace => (Role::Act, None),
                away if away >= SILENCE => (Role::Observe, after(grace)),
                _ => (Role::Rest, after(grace.min(SILENCE))),
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
            (Presence::Never, (Role::Act, None)),
            (Presence::Ready, (Role::Rest, None)),
            (Presence::Away(at(100)), (Role::Rest, Some(at(130)))),
            (Presence::Away(at(71)), (Role::Rest, Some(at(101)))),
            (Presence::Away(at(70)), (Role::Observe, Some(at(130)))),
            (Presence::Away(at(41)), (Role::Observe, Some(at(101)))),
            (Presence::Away(at(40)), (Role::Act, None)),
        ];
        let short = Duration::from_secs(5);
        assert_eq!(
            role(Presence::Away(at(96)), short, at(100)),
            (Role::Rest, Some(at(101)))
        );
        for (presence, expected) in cases {
            assert_eq!(role(presence, grace, at(100)), expected, "{presence:?}");
        }
    }
}
