//! Decides which member may act on which cluster. Compares members by the UID of their cluster. Performs no
//! I/O.

use std::collections::BTreeMap;

use jiff::Timestamp;
use krypton_types::conditions::reason;
use krypton_types::names;

/// Known facts about a member's identity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemberIdentity {
    /// The member has a source, or an agent was enrolled for it.
    pub present: bool,
    /// An agent was enrolled for the member.
    pub agent: bool,
    /// Creation time of its EdgeCluster.
    pub created: Option<Timestamp>,
    /// The UID that its EdgeCluster has recorded.
    pub recorded_uid: Option<String>,
    /// The current UID of its cluster.
    pub current_uid: Option<String>,
    /// The hub or an agent has tried to reach the cluster at least once.
    pub attempted: bool,
}

impl MemberIdentity {
    fn known_uid(&self) -> Option<&str> {
        self.current_uid.as_deref().or(self.recorded_uid.as_deref())
    }
}

/// Whether the hub may act on a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ActDecision {
    Act,
    /// The member was not reached yet. Or an older member, possibly of the same cluster, was not.
    Wait,
    /// The named member has the same cluster and takes precedence.
    Duplicate(String),
    /// The cluster is recorded under the named member, whose source is gone.
    Renamed(String),
    /// The cluster that responds, with this UID, is not the recorded one.
    Changed(String),
}

/// Decides for all members together.
pub fn decide_all(identities: &BTreeMap<String, MemberIdentity>) -> BTreeMap<String, ActDecision> {
    // Only members with equal or unknown UIDs can conflict.
    let mut by_uid: BTreeMap<Option<&str>, Vec<(&String, &MemberIdentity)>> = BTreeMap::new();
    for (name, identity) in identities {
        by_uid
            .entry(identity.known_uid())
            .or_default()
            .push((name, identity));
    }
    let members_with = |uid| by_uid.get(&uid).map(Vec::as_slice).unwrap_or_default();
    identities
        .iter()
        .filter(|(_, identity)| identity.present)
        .map(|(name, identity)| {
            let rivals =
                members_with(identity.known_uid())
                    .iter()
                    .chain(match identity.known_uid() {
                        Some(_) => members_with(None),
                        None => &[],
                    });
            (name.clone(), decide(name, identity, rivals))
        })
        .collect()
}

fn decide<'a>(
    name: &str,
    identity: &MemberIdentity,
    rivals: impl Iterator<Item = &'a (&'a String, &'a MemberIdentity)>,
) -> ActDecision {
    let Some(current) = identity.current_uid.as_deref() else {
        return ActDecision::Wait;
    };
    let recorded = identity.recorded_uid.as_deref();
    if recorded.is_some_and(|recorded| recorded != current) {
        return ActDecision::Changed(current.to_owned());
    }
    let mut wait = false;
    for (other_name, other) in rivals {
        if *other_name == name {
            continue;
        }
        if other.known_uid() == Some(current) {
            if !other.present {
                // Releases carry the member's name, so a new name would install all of them again.
                if identity.recorded_uid.is_none() {
                    return ActDecision::Renamed((*other_name).clone());
                }
            } else if takes_precedence(other_name, other, name, identity) {
                return ActDecision::Duplicate((*other_name).clone());
            }
        } else if other.present
            && other.known_uid().is_none()
            && !other.attempted
            && takes_precedence(other_name, other, name, identity)
        {
            wait = true;
        }
    }
    if wait {
        ActDecision::Wait
    } else {
        ActDecision::Act
    }
}

/// Returns reason and message why the hub must not act on a member, or `None` if it may.
pub fn held_back(
    name: &str,
    decision: &ActDecision,
    banned: bool,
) -> Option<(&'static str, String)> {
    if banned {
        return Some((
            reason::BANNED,
            "spec.banned is set on the EdgeCluster".to_owned(),
        ));
    }
    match decision {
        ActDecision::Act => None,
        ActDecision::Wait => Some((
            reason::CONNECTING,
            "checking whether an older member is the same cluster".to_owned(),
        )),
        ActDecision::Duplicate(other) => Some((
            reason::DUPLICATE,
            format!(
                "member {other} represents the same cluster and reconciles it; remove one of the two members"
            ),
        )),
        ActDecision::Renamed(old) => Some((
            reason::RENAMED,
            format!(
                "this cluster is already member {old}, and release names contain that name; restore the Secret under the old name, or delete EdgeCluster {old} to install everything again under this name"
            ),
        )),
        ActDecision::Changed(current) => Some((
            reason::IDENTITY_CHANGED,
            format!(
                "the cluster that responds (UID {current}) is not the recorded one; if you rebuilt the cluster, run 'kubectl krypton join {name} --replace'"
            ),
        )),
    }
}

/// Whether member `a` takes precedence over `b`. The order is: `self-cluster`, a member with a recorded UID, a
/// member with an agent, the older EdgeCluster, the name. A recorded UID outranks any report of a new member.
fn takes_precedence(a_name: &str, a: &MemberIdentity, b_name: &str, b: &MemberIdentity) -> bool {
    fn rank<'a>(
        name: &'a str,
        identity: &MemberIdentity,
    ) -> (bool, bool, bool, bool, Option<Timestamp>, &'a str) {
        // A member without an EdgeCluster counts as the youngest.
        (
            name != names::SELF_CLUSTER,
            identity.recorded_uid.is_none(),
            !identity.agent,
            identity.created.is_none(),
            identity.created,
            name,
        )
    }
    rank(a_name, a) < rank(b_name, b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(
        created: i64,
        recorded_uid: Option<&str>,
        current_uid: Option<&str>,
    ) -> MemberIdentity {
        MemberIdentity {
            present: true,
            agent: false,
            created: Some(Timestamp::from_second(created).unwrap()),
            recorded_uid: recorded_uid.map(str::to_owned),
            current_uid: current_uid.map(str::to_owned),
            attempted: current_uid.is_some(),
        }
    }

    fn decisions<const N: usize>(
        identities: [(&str, MemberIdentity); N],
    ) -> BTreeMap<String, ActDecision> {
        let identities = identities.map(|(name, identity)| (name.to_owned(), identity));
        decide_all(&identities.into())
    }

    #[test]
    fn older_member_wins_shared_cluster_uid() {
        let decided = decisions([
            ("a", identity(2, None, Some("u"))),
            ("b", identity(1, None, Some("u"))),
        ]);
        assert_eq!(decided["a"], ActDecision::Duplicate("b".to_owned()));
        assert_eq!(decided["b"], ActDecision::Act);
    }

    #[test]
    fn self_cluster_goes_before_every_older_member() {
        let decided = decisions([
            ("a", identity(1, Some("u"), Some("u"))),
            (names::SELF_CLUSTER, identity(9, None, Some("u"))),
        ]);
        assert_eq!(
            decided["a"],
            ActDecision::Duplicate(names::SELF_CLUSTER.to_owned())
        );
        assert_eq!(decided[names::SELF_CLUSTER], ActDecision::Act);
    }

    #[test]
    fn member_with_agent_precedes_older_one_without() {
        let mut agent = identity(9, None, Some("u"));
        agent.agent = true;
        let decided = decisions([("a", identity(1, None, Some("u"))), ("b", agent.clone())]);
        assert_eq!(decided["a"], ActDecision::Duplicate("b".to_owned()));
        assert_eq!(decided["b"], ActDecision::Act);
        // An agent's report cannot displace the recorded member.
        let decided = decisions([("a", identity(1, Some("u"), Some("u"))), ("b", agent)]);
        assert_eq!(decided["a"], ActDecision::Act);
        assert_eq!(decided["b"], ActDecision::Duplicate("a".to_owned()));
    }

    #[test]
    fn younger_member_waits_until_older_was_attempted() {
        let mut older = identity(1, None, None);
        let decided = decisions([
            ("old", older.clone()),
            ("new", identity(2, None, Some("u"))),
        ]);
        assert_eq!(decided["new"], ActDecision::Wait);
        older.attempted = true;
        let decided = decisions([("old", older), ("new", identity(2, None, Some("u")))]);
        assert_eq!(decided["new"], ActDecision::Act);
    }

    #[test]
    fn unreachable_member_keeps_recorded_cluster_uid() {
        let decided = decisions([
            ("old", identity(1, Some("u"), None)),
            ("new", identity(2, None, Some("u"))),
        ]);
        assert_eq!(decided["new"], ActDecision::Duplicate("old".to_owned()));
    }

    #[test]
    fn known_cluster_under_new_name_is_held() {
        let mut gone = identity(1, Some("u"), None);
        gone.present = false;
        let decided = decisions([("old", gone.clone()), ("new", identity(2, None, Some("u")))]);
        assert_eq!(decided["new"], ActDecision::Renamed("old".to_owned()));
        // A member already recorded under this name continues.
        let decided = decisions([("old", gone), ("new", identity(2, Some("u"), Some("u")))]);
        assert_eq!(decided["new"], ActDecision::Act);
    }

    #[test]
    fn changed_cluster_behind_same_name_is_not_touched() {
        let decided = decisions([("a", identity(1, Some("u"), Some("v")))]);
        assert_eq!(decided["a"], ActDecision::Changed("v".to_owned()));
    }
}
