//! Decides which member may act on which cluster. Compares members by the UID of their cluster. Performs no
//! I/O.

use std::collections::BTreeMap;

use jiff::Timestamp;
use krypton_types::conditions::reason;
use krypton_types::names;

/// Known facts about a member's identity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// The member has a source, or an agent was enrolled for it.
    pub present: bool,
    /// An agent was enrolled for the member.
    pub agent: bool,
    /// Creation time of its EdgeCluster.
    pub created: Option<Timestamp>,
    /// The UID that its EdgeCluster has recorded.
    pub recorded: Option<String>,
    /// The current UID of its cluster.
    pub found: Option<String>,
    /// The hub or an agent has tried to reach the cluster at least once.
    pub attempted: bool,
}

impl Claim {
    fn uid(&self) -> Option<&str> {
        self.found.as_deref().or(self.recorded.as_deref())
    }
}

/// Decision on a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Act,
    /// The member was not reached yet. Or an older member, possibly of the same cluster, was not.
    Wait,
    /// The named member has the same cluster and takes precedence.
    Duplicate(String),
    /// The cluster is recorded under the named member, whose source is gone.
    Renamed(String),
    /// The cluster that responds is not the recorded one.
    Changed {
        recorded: String,
        found: String,
    },
}

/// Decides for all members together.
pub fn verdicts(claims: &BTreeMap<String, Claim>) -> BTreeMap<String, Verdict> {
    // Only members with equal or unknown UIDs can conflict.
    let mut by_uid: BTreeMap<Option<&str>, Vec<(&String, &Claim)>> = BTreeMap::new();
    for (name, claim) in claims {
        by_uid.entry(claim.uid()).or_default().push((name, claim));
    }
    let of = |uid| by_uid.get(&uid).map(Vec::as_slice).unwrap_or_default();
    claims
        .iter()
        .filter(|(_, claim)| claim.present)
        .map(|(name, claim)| {
            let rivals = of(claim.uid()).iter().chain(match claim.uid() {
                Some(_) => of(None),
                None => &[],
            });
            (name.clone(), verdict(name, claim, rivals))
        })
        .collect()
}

fn verdict<'a>(
    name: &str,
    claim: &Claim,
    rivals: impl Iterator<Item = &'a (&'a String, &'a Claim)>,
) -> Verdict {
    let Some(found) = claim.found.as_deref() else {
        return Verdict::Wait;
    };
    if let Some(recorded) = claim.recorded.as_deref()
        && recorded != found
    {
        return Verdict::Changed {
            recorded: recorded.to_owned(),
            found: found.to_owned(),
        };
    }
    let mut wait = false;
    for (other_name, other) in rivals {
        if *other_name == name {
            continue;
        }
        if other.uid() == Some(found) {
            if !other.present {
                // Releases carry the member's name, so a new name would install all of them again.
                if claim.recorded.is_none() {
                    return Verdict::Renamed((*other_name).clone());
                }
            } else if goes_first(other_name, other, name, claim) {
                return Verdict::Duplicate((*other_name).clone());
            }
        } else if other.present
            && other.uid().is_none()
            && !other.attempted
            && goes_first(other_name, other, name, claim)
        {
            wait = true;
        }
    }
    if wait { Verdict::Wait } else { Verdict::Act }
}

/// Returns reason and message why the hub must not act on a member, or `None` if it may.
pub fn held_back(name: &str, verdict: &Verdict, banned: bool) -> Option<(&'static str, String)> {
    if banned {
        return Some((
            reason::BANNED,
            "spec.banned is set on the EdgeCluster".to_owned(),
        ));
    }
    match verdict {
        Verdict::Act => None,
        Verdict::Wait => Some((
            reason::CONNECTING,
            "checking whether an older member is the same cluster".to_owned(),
        )),
        Verdict::Duplicate(other) => Some((
            reason::DUPLICATE,
            format!(
                "this is the same cluster as member {other}, which acts on it; remove one of the two"
            ),
        )),
        Verdict::Renamed(old) => Some((
            reason::RENAMED,
            format!(
                "this cluster is already member {old}, and release names contain that name; restore the Secret under the old name, or delete EdgeCluster {old} to install everything again under this name"
            ),
        )),
        Verdict::Changed { found, .. } => Some((
            reason::IDENTITY_CHANGED,
            format!(
                "another cluster answers (UID {found}) than the recorded one; if the cluster was rebuilt, run 'kubectl krypton join {name} --replace'"
            ),
        )),
    }
}

/// Whether member `a` takes precedence over `b`. The order is: `self-cluster`, a member with a recorded UID, a
/// member with an agent, the older EdgeCluster, the name. A recorded UID outranks any report of a new member.
fn goes_first(a_name: &str, a: &Claim, b_name: &str, b: &Claim) -> bool {
    fn rank<'a>(
        name: &'a str,
        claim: &Claim,
    ) -> (bool, bool, bool, bool, Option<Timestamp>, &'a str) {
        // A member without an EdgeCluster counts as the youngest.
        (
            name != names::SELF_CLUSTER,
            claim.recorded.is_none(),
            !claim.agent,
            claim.created.is_none(),
            claim.created,
            name,
        )
    }
    rank(a_name, a) < rank(b_name, b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(created: i64, recorded: Option<&str>, found: Option<&str>) -> Claim {
        Claim {
            present: true,
            agent: false,
            created: Some(Timestamp::from_second(created).unwrap()),
            recorded: recorded.map(str::to_owned),
            found: found.map(str::to_owned),
            attempted: found.is_some(),
        }
    }

    pub(crate) fn of(claims: Vec<(&str, Claim)>) -> BTreeMap<String, Verdict> {
        verdicts(
            &claims
                .into_iter()
                .map(|(name, claim)| (name.to_owned(), claim))
                .collect(),
        )
    }

    #[test]
    fn older_member_wins_shared_cluster_uid() {
        let found = of(vec![
            ("a", claim(2, None, Some("u"))),
            ("b", claim(1, None, Some("u"))),
        ]);
        assert_eq!(found["a"], Verdict::Duplicate("b".to_owned()));
        assert_eq!(found["b"], Verdict::Act);
    }

    #[test]
    fn self_cluster_goes_before_every_older_member() {
        let found = of(vec![
            ("a", claim(1, Some("u"), Some("u"))),
            (names::SELF_CLUSTER, claim(9, None, Some("u"))),
        ]);
        assert_eq!(
            found["a"],
            Verdict::Duplicate(names::SELF_CLUSTER.to_owned())
        );
        assert_eq!(found[names::SELF_CLUSTER], Verdict::Act);
    }

    #[test]
    fn member_with_agent_precedes_older_one_without() {
        let mut agent = claim(9, None, Some("u"));
        agent.agent = true;
        let found = of(vec![("a", claim(1, None, Some("u"))), ("b", agent.clone())]);
        assert_eq!(found["a"], Verdict::Duplicate("b".to_owned()));
        assert_eq!(found["b"], Verdict::Act);
        // An agent's report cannot displace the recorded member.
        let found = of(vec![("a", claim(1, Some("u"), Some("u"))), ("b", agent)]);
        assert_eq!(found["a"], Verdict::Act);
        assert_eq!(found["b"], Verdict::Duplicate("a".to_owned()));
    }

    #[test]
    fn younger_member_waits_until_older_was_attempted() {
        let mut older = claim(1, None, None);
        let found = of(vec![
            ("old", older.clone()),
            ("new", claim(2, None, Some("u"))),
        ]);
        assert_eq!(found["new"], Verdict::Wait);
        older.attempted = true;
        let found = of(vec![("old", older), ("new", claim(2, None, Some("u")))]);
        assert_eq!(found["new"], Verdict::Act);
    }

    #[test]
    fn unreachable_member_keeps_recorded_cluster_uid() {
        let found = of(vec![
            ("old", claim(1, Some("u"), None)),
            ("new", claim(2, None, Some("u"))),
        ]);
        assert_eq!(found["new"], Verdict::Duplicate("old".to_owned()));
    }

    #[test]
    fn known_cluster_under_new_name_is_held() {
        let mut gone = claim(1, Some("u"), None);
        gone.present = false;
        let found = of(vec![
            ("old", gone.clone()),
            ("new", claim(2, None, Some("u"))),
        ]);
        assert_eq!(found["new"], Verdict::Renamed("old".to_owned()));
        // A member already recorded under this name continues.
        let found = of(vec![("old", gone), ("new", claim(2, Some("u"), Some("u")))]);
        assert_eq!(found["new"], Verdict::Act);
    }

    #[test]
    fn changed_cluster_behind_same_name_is_not_touched() {
        let found = of(vec![("a", claim(1, Some("u"), Some("v")))]);
        let changed = Verdict::Changed {
            recorded: "u".to_owned(),
            found: "v".to_owned(),
        };
        assert_eq!(found["a"], changed);
    }
}
