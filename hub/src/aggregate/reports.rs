//! The newest reports of all members: a slot for each Tenant of each, the latest wins.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use krypton_agent::clock::Boot;
use krypton_common::account::{self, AccountDigest};
use krypton_common::allowed::Allowed;
use krypton_common::conditions::{self, State, reason};
use krypton_common::names;
use krypton_common::tenant::{TenantKey, TenantReport};
use krypton_crds::edge_cluster::SummarisedTenants;
use tokio::sync::Notify;

use super::listing;
use crate::metrics::HomeWrites;

/// A member that has not been heard for this long after its beginning is unheard.
pub(super) const START_GRACE: Duration = Duration::from_secs(45);

/// Tenants that are kept of one member: ten times what one cluster is meant for.
pub const TENANTS_MAX: usize = 10_000;

/// How a member stands, as far as its reports go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Hearing {
    /// On its way, since the hub or the member's proxy was started.
    #[default]
    NotYet,
    /// It reports all it has.
    Full,
    /// It has fallen silent: why.
    Silent(String),
}

#[derive(Debug, Default)]
struct MemberReports {
    hearing: Hearing,
    /// When it was last begun with.
    begun: Boot,
    tenants: BTreeMap<TenantKey, TenantReport>,
    /// What was reported since: the rest goes once the member has said all it has.
    fresh: BTreeSet<TenantKey>,
    /// It has said all it has since it was begun with.
    whole: bool,
    digest: AccountDigest,
}

#[derive(Debug, Default)]
struct Board {
    members: BTreeMap<String, MemberReports>,
    /// What Tenants may name; `None` until the EdgeClusters are known.
    targets: Option<Arc<Targets>>,
    dirty: BTreeSet<TenantKey>,
    all_dirty: bool,
    /// Tenants of home whose own status is a summary; `None` until home's Tenants are known.
    summarised: Option<BTreeSet<TenantKey>>,
}

/// All members, by name.
pub type Targets = BTreeMap<String, Target>;

/// A member, as far as it concerns a Tenant that names it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// Of the object that it was found by, which a `clusterRef` may name too.
    pub source_namespace: Option<String>,
    pub allowed: Allowed,
    /// The cluster that it is, once it has been reached.
    pub cluster_uid: Option<String>,
    /// Another member is the same cluster, and acts on it.
    pub duplicate: bool,
    /// `TargetClusterResolved` of its EdgeCluster.
    pub resolved: Option<State>,
}

/// Changes, with what each adds to the digest: made before any lock is taken.
#[derive(Debug)]
pub struct Changed(BTreeMap<TenantKey, Option<(TenantReport, u128)>>);

impl Changed {
    pub fn new(changes: BTreeMap<TenantKey, Option<TenantReport>>) -> Self {
        let with_part = |(key, report): (TenantKey, Option<TenantReport>)| {
            let change = report.map(|report| {
                let part = account::part(&key, &report);
                (report, part)
            });
            (key, change)
        };
        Self(changes.into_iter().map(with_part).collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The newest reports of all members, a slot for each Tenant of each.
#[derive(Debug, Default)]
pub struct Reports {
    state: Mutex<Board>,
    pub(super) changed: Notify,
    /// What is made of them on home, counted.
    pub writes: HomeWrites,
}

impl Reports {
    /// Takes in one member's changes. False when there are more Tenants than are kept of one.
    pub fn report(&self, member: &str, changes: Changed) -> bool {
        let mut state = self.lock();
        let board = &mut *state;
        let reports = board.members.entry(member.to_owned()).or_default();
        for (key, change) in changes.0 {
            reports
                .digest
                .set_part(&key, change.as_ref().map(|(_, part)| *part));
            match change {
                Some((report, _)) => {
                    if !reports.whole {
                        reports.fresh.insert(key.clone());
                    }
                    reports.tenants.insert(key.clone(), report);
                }
                None => {
                    reports.tenants.remove(&key);
                }
            }
            board.dirty.insert(key);
        }
        let kept = reports.tenants.len() <= TENANTS_MAX;
        drop(state);
        self.changed.notify_one();
        kept
    }

    pub fn hearing(&self, member: &str, hearing: Hearing) {
        let mut state = self.lock();
        let reports = state.members.entry(member.to_owned()).or_default();
        if reports.hearing != hearing {
            if hearing == Hearing::Full {
                let fresh = std::mem::take(&mut reports.fresh);
                if !reports.whole {
                    reports.tenants.retain(|key, _| fresh.contains(key));
                    reports.digest.retain(|key| fresh.contains(key));
                    reports.whole = true;
                }
            }
            reports.hearing = hearing;
            state.all_dirty = true;
            drop(state);
            self.changed.notify_one();
        }
    }

    /// Of these Tenants there is something new.
    pub fn touch(&self, keys: BTreeSet<TenantKey>) {
        if !keys.is_empty() {
            self.lock().dirty.extend(keys);
            self.changed.notify_one();
        }
    }

    /// What Tenants may name, by what all EdgeClusters say.
    pub fn aim(&self, targets: Targets) {
        let mut state = self.lock();
        if state.targets.as_deref() != Some(&targets) {
            state.targets = Some(Arc::new(targets));
            state.all_dirty = true;
            drop(state);
            self.changed.notify_one();
        }
    }

    /// The EdgeClusters are read anew: what Tenants may name is not known until then.
    pub fn aim_anew(&self) {
        self.lock().targets = None;
    }

    /// What they may name now.
    pub(super) fn targets(&self) -> Option<Arc<Targets>> {
        self.lock().targets.clone()
    }

    /// A member begins anew: what it has said stands until it has said all again.
    pub fn begin(&self, member: &str, now: Boot) {
        let mut state = self.lock();
        let reports = state.members.entry(member.to_owned()).or_default();
        reports.hearing = Hearing::NotYet;
        reports.begun = now;
        reports.fresh.clear();
        reports.whole = false;
        state.all_dirty = true;
        drop(state);
        self.changed.notify_one();
    }

    /// As [`Self::begin`], of a member that is known; what it has said does not stand.
    pub fn forget_said(&self, member: &str, now: Boot) {
        let mut state = self.lock();
        let Some(reports) = state.members.get_mut(member) else {
            return;
        };
        *reports = MemberReports {
            begun: now,
            ..MemberReports::default()
        };
        state.all_dirty = true;
        drop(state);
        self.changed.notify_one();
    }

    /// How many Tenants the member has reported, and the digest of all that it has said of them; `None`
    /// until it has said all.
    pub fn digest(&self, member: &str) -> Option<(u64, u128)> {
        let state = self.lock();
        let reports = state.members.get(member)?;
        reports.whole.then(|| reports.digest.value())
    }

    /// How many of a member's Tenants say that their release has gone with the member; `None` until it has
    /// said all.
    pub fn retired(&self, member: &str) -> Option<Retired> {
        let state = self.lock();
        let reports = state.members.get(member)?;
        if !reports.whole || reports.hearing != Hearing::Full {
            return None;
        }
        let tenants = reports.tenants.values();
        let gone = tenants.filter(|report| report.state.ready.reason == reason::UNINSTALLED);
        Some(Retired {
            tenants: reports.tenants.len(),
            gone: gone.count(),
        })
    }

    /// Tenants of a member by phase: all, ready, pending, error.
    pub fn counts(&self, member: &str, allow_chart_skip: bool) -> Counts {
        let state = self.lock();
        let mut counts = Counts::default();
        for report in state
            .members
            .get(member)
            .into_iter()
            .flat_map(|found| found.tenants.values())
        {
            let one = [(String::new(), report.state.clone())].into();
            counts.total += 1;
            match conditions::summarise(&one, allow_chart_skip).phase {
                conditions::Phase::Ready => counts.ready += 1,
                conditions::Phase::Pending => counts.pending += 1,
                conditions::Phase::Error => counts.error += 1,
            }
        }
        counts
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Board> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is heard of one Tenant; of members that are `recorded` with it also that they say nothing.
    pub(super) fn of(&self, key: &TenantKey, recorded: impl Fn(&str) -> bool, now: Boot) -> Heard {
        let state = self.lock();
        let mut heard = Heard {
            targets: state.targets.clone(),
            ..Heard::default()
        };
        for (name, member) in &state.members {
            let report = member.tenants.get(key);
            if report.is_none() && member.hearing == Hearing::Full && !recorded(name) {
                let here = |targets: &Arc<Targets>| targets.contains_key(name);
                let counts = name != names::SELF_CLUSTER;
                heard.strangers += usize::from(counts && state.targets.as_ref().is_some_and(here));
                continue;
            }
            let saying = Saying {
                hearing: member.hearing.clone(),
                report: report.cloned(),
                patient: now.since(member.begun) < START_GRACE,
            };
            heard.said.insert(name.clone(), saying);
        }
        heard
    }

    /// What has changed since the last call.
    pub(super) fn take_dirty(&self) -> Dirty {
        let mut state = self.lock();
        Dirty {
            all: std::mem::take(&mut state.all_dirty),
            keys: std::mem::take(&mut state.dirty),
        }
    }

    /// Home's Tenants are known: these have a summary for their status.
    pub(super) fn summarise_only(&self, tenants: BTreeSet<TenantKey>) {
        self.lock().summarised = Some(tenants);
    }

    /// The status of this Tenant is a summary, or again not.
    pub(super) fn summarised(&self, key: &TenantKey, is: bool) {
        if let Some(summarised) = &mut self.lock().summarised {
            if is {
                summarised.insert(key.clone());
            } else {
                summarised.remove(key);
            }
        }
    }

    /// The part of a member in the Tenants whose own status does not list all; `None` while that is not
    /// known.
    pub fn listing(&self, member: &str, allow_chart_skip: bool) -> Option<SummarisedTenants> {
        let state = self.lock();
        let summarised = state.summarised.as_ref()?;
        let reports = state.members.get(member).filter(|found| found.whole)?;
        let reported = summarised.iter().filter_map(|key| {
            let report = reports.tenants.get(key)?;
            Some((key, &report.state))
        });
        Some(listing::listing(reported, allow_chart_skip))
    }

    /// The member is no more, and nobody speaks for it.
    pub fn forget(&self, member: &str) {
        self.lock().members.remove(member);
    }

    /// When the patience with the next member that is on its way ends.
    pub(super) fn patience_ends(&self, now: Boot) -> Option<Boot> {
        let state = self.lock();
        let waiting = state
            .members
            .values()
            .filter(|member| member.hearing == Hearing::NotYet);
        waiting
            .map(|member| Boot(member.begun.0 + START_GRACE))
            .filter(|at| *at > now)
            .min()
    }
}

/// Tenants of a member that leaves with its releases, and how many of them are done with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retired {
    pub tenants: usize,
    pub gone: usize,
}

/// What one member says of one Tenant.
#[derive(Clone, Debug)]
pub(super) struct Saying {
    pub(super) hearing: Hearing,
    pub(super) report: Option<TenantReport>,
    /// It is on its way, and not yet late.
    pub(super) patient: bool,
}

/// What is heard of one Tenant.
#[derive(Clone, Debug, Default)]
pub(super) struct Heard {
    /// Of all members that have something to say of it, or may have.
    pub(super) said: BTreeMap<String, Saying>,
    /// How many more there are, which say all they have and nothing of it.
    pub(super) strangers: usize,
    pub(super) targets: Option<Arc<Targets>>,
}

/// What is to be looked at again.
#[derive(Debug, Default)]
pub(super) struct Dirty {
    pub(super) all: bool,
    pub(super) keys: BTreeSet<TenantKey>,
}

/// Tenants of a member by phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub total: u32,
    pub ready: u32,
    pub pending: u32,
    pub error: u32,
}
