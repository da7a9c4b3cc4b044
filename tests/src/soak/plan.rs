//! Generates the faults and their times as a pure function of the seed.

use std::{collections::BTreeSet, time::Duration};

use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

use super::{
    fault::{Answered, Away, Fault, Hold, Kind, Mark, Way},
    whom::{Edge, Object, Seat, Tenant, Workspace},
};

/// Minimum length of a burst, in seconds.
const SHORTEST: u64 = 60;
const LONGEST: u64 = 120;
/// Seconds of a burst for each fault.
const SECONDS_EACH: u64 = 3;
/// Minimum share of an edge cluster's slots with live Tenants.
const LIVE: (usize, usize) = (2, 3);

/// The parameters of the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) seed: u64,
    /// Number of Tenant slots on both edge clusters. A slot has a name and is live or not.
    pub(crate) tenants: usize,
    pub(crate) hubs: usize,
}

/// A fault and its start within the burst.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) at: Duration,
    pub(crate) fault: Fault,
}

/// Faults that end before the burst does, including the time that Krypton may wait after each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Burst {
    pub(crate) number: usize,
    pub(crate) length: Duration,
    pub(crate) steps: Vec<Step>,
}

/// The state of a slot after the bursts so far.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Slot {
    live: bool,
    workspace: Workspace,
}

/// An infinite sequence of bursts.
#[derive(Debug)]
pub(crate) struct Plan {
    chance: Xoshiro256PlusPlus,
    slots: Vec<Slot>,
    hubs: usize,
    version: u32,
    message: u32,
    foreign: u32,
    number: usize,
}

impl Plan {
    pub(crate) fn new(shape: Shape) -> Self {
        let mut chance = Xoshiro256PlusPlus::seed_from_u64(shape.seed);
        let slots = (0..shape.tenants)
            .map(|_| Slot {
                live: true,
                workspace: some_workspace(&mut chance),
            })
            .collect();
        Self {
            chance,
            slots,
            hubs: shape.hubs,
            version: 0,
            message: 0,
            foreign: 0,
            number: 0,
        }
    }

    /// Returns all initial Tenants with their workspaces.
    pub(crate) fn first(&self) -> Vec<(Tenant, Workspace)> {
        let all = self.slots.iter().enumerate();
        all.map(|(slot, state)| (Tenant(slot), state.workspace))
            .collect()
    }
}

fn some_workspace(chance: &mut Xoshiro256PlusPlus) -> Workspace {
    match chance.random_range(0..4) {
        0 => Workspace::Unset,
        1 => Workspace::Shared(chance.random_range(0..2)),
        _ => Workspace::Own,
    }
}

/// A burst during its generation.
struct Draft {
    length: u64,
    /// (target, from, until) in seconds. Faults of the same target don't overlap.
    busy: Vec<(Hold, u64, u64)>,
    /// Tenants with a fault. Each gets one fault for each burst.
    touched: BTreeSet<usize>,
    crd: BTreeSet<Edge>,
    held: BTreeSet<Edge>,
    steps: Vec<Step>,
}

impl Iterator for Plan {
    type Item = Burst;

    fn next(&mut self) -> Option<Burst> {
        let length = self.chance.random_range(SHORTEST..=LONGEST);
        let mut draft = Draft {
            length,
            busy: Vec::new(),
            touched: BTreeSet::new(),
            crd: BTreeSet::new(),
            held: BTreeSet::new(),
            steps: Vec::new(),
        };
        for _ in 0..length / SECONDS_EACH {
            let kind = self.some_kind();
            if let Some(fault) = self.some_fault(kind, &draft) {
                self.place(fault, &mut draft);
            }
        }
        // Every Tenant gets a Helm run in each burst, which detects damaged releases.
        self.message += 1;
        let late = Fault::Message {
            number: self.message,
        };
        let at = length - seconds(late.lasting()) - 5;
        draft.steps.push(Step {
            at: Duration::from_secs(at),
            fault: late,
        });
        draft.steps.sort_by_key(|step| step.at);
        self.number += 1;
        Some(Burst {
            number: self.number,
            length: Duration::from_secs(length),
            steps: draft.steps,
        })
    }
}

impl Plan {
    fn some_kind(&mut self) -> Kind {
        let all: u32 = Kind::of(self.hubs).map(|(_, weight)| weight).sum();
        let mut drawn = self.chance.random_range(0..all);
        for (kind, weight) in Kind::of(self.hubs) {
            if drawn < weight {
                return kind;
            }
            drawn -= weight;
        }
        Kind::Message
    }

    fn some_fault(&mut self, kind: Kind, draft: &Draft) -> Option<Fault> {
        let edge = if self.chance.random_bool(0.5) {
            Edge::One
        } else {
            Edge::Two
        };
        let away = |plan: &mut Self, from: u64, to: u64| {
            Duration::from_secs(plan.chance.random_range(from..=to))
        };
        let fault = match kind {
            Kind::HubKilled => Fault::HubKilled {
                hub: self.some_hub(),
                away: away(self, 1, 8),
            },
            Kind::HubStopped => Fault::HubStopped {
                hub: self.some_hub(),
                away: away(self, 1, 8),
            },
            // Shorter and longer than the leader's Lease.
            Kind::HubFrozen => Fault::HubFrozen {
                hub: self.some_hub(),
                away: away(self, 1, 15),
            },
            // Longer than the leader's Lease, and sometimes also longer than a member's.
            Kind::LeadFrozen => Fault::LeadFrozen {
                away: match self.chance.random_bool(0.8) {
                    true => away(self, 7, 40),
                    false => away(self, 61, 70),
                },
            },
            Kind::HubsKilled => Fault::HubsKilled {
                away: away(self, 1, 8),
            },
            Kind::HomeWay => Fault::HomeWay {
                hub: self.some_hub(),
                way: self.some_way(),
                away: away(self, 3, 35),
            },
            Kind::AgentKilled => Fault::AgentKilled {
                away: away(self, 1, 8),
            },
            Kind::HelmKilled => Fault::HelmKilled,
            // Shorter and longer than the Lease.
            Kind::AgentFrozen => Fault::AgentFrozen {
                away: match self.chance.random_bool(0.5) {
                    true => away(self, 5, 40),
                    false => away(self, 61, 70),
                },
            },
            Kind::ApiserverKilled => Fault::ApiserverKilled {
                edge,
                away: away(self, 1, 15),
            },
            Kind::PowerLost => Fault::PowerLost {
                edge,
                away: away(self, 1, 10),
            },
            Kind::Link => Fault::Link {
                hub: self.chance.random_bool(0.7).then(|| self.some_hub()),
                way: self.some_way(),
                away: away(self, 3, 35),
            },
            Kind::Way => Fault::Way {
                edge,
                way: self.some_way(),
                away: away(self, 3, 35),
            },
            Kind::Answers => Fault::Answers {
                edge,
                answer: self.some_answer(),
                away: away(self, 2, 15),
            },
            Kind::Kubeconfig => Fault::Kubeconfig {
                away: away(self, 3, 20),
            },
            Kind::Message => {
                self.message += 1;
                Fault::Message {
                    number: self.message,
                }
            }
            Kind::Version => {
                self.version = (self.version + 1) % 2;
                Fault::Version {
                    number: self.version,
                }
            }
            Kind::Repository => Fault::Repository {
                how: match self.chance.random_range(0..3) {
                    0 => Away::Gone,
                    1 => Away::Failing,
                    _ => Away::Rubbish,
                },
                away: away(self, 3, 20),
            },
            Kind::Crd => {
                let free = !draft.crd.contains(&edge) && !draft.held.contains(&edge);
                free.then_some(Fault::Crd { edge })?
            }
            Kind::Created => {
                let tenant = self.some_tenant(draft, false)?;
                Fault::Created {
                    tenant,
                    workspace: some_workspace(&mut self.chance),
                }
            }
            _ => {
                let tenant = self.some_tenant(draft, true)?;
                self.of_tenant(kind, tenant, draft)?
            }
        };
        Some(fault)
    }

    fn of_tenant(&mut self, kind: Kind, tenant: Tenant, draft: &Draft) -> Option<Fault> {
        let enough = || {
            let on_edge = |slot: &usize| Tenant(*slot).edge() == tenant.edge();
            let all = (0..self.slots.len()).filter(on_edge).count();
            let live = (0..self.slots.len())
                .filter(on_edge)
                .filter(|slot| self.slots.get(*slot).is_some_and(|slot| slot.live));
            live.count() * LIVE.1 > all * LIVE.0
        };
        let fault = match kind {
            Kind::Deleted => enough().then_some(Fault::Deleted { tenant })?,
            Kind::Recreated => Fault::Recreated {
                tenant,
                workspace: some_workspace(&mut self.chance),
            },
            Kind::WorkspaceSet => {
                let state = self.slots.get(tenant.0)?;
                let unset = state.workspace == Workspace::Unset;
                unset.then_some(Fault::WorkspaceSet { tenant })?
            }
            Kind::Paused => Fault::Paused {
                tenant,
                away: Duration::from_secs(self.chance.random_range(3..=30)),
            },
            Kind::ReleaseDeleted => Fault::ReleaseDeleted {
                tenant,
                all: self.chance.random_bool(0.3),
            },
            Kind::ReleaseDamaged => Fault::ReleaseDamaged { tenant },
            Kind::ReleaseMarked => Fault::ReleaseMarked {
                tenant,
                mark: Mark::ALL[self.chance.random_range(0..Mark::ALL.len())],
            },
            Kind::ForeignObject => {
                self.foreign += 1;
                Fault::ForeignObject {
                    tenant,
                    number: self.foreign,
                }
            }
            Kind::ForeignRelease => {
                self.foreign += 1;
                Fault::ForeignRelease {
                    tenant,
                    number: self.foreign,
                }
            }
            Kind::ForeignFinalizer => (!draft.crd.contains(&tenant.edge()))
                .then_some(Fault::ForeignFinalizer { tenant })?,
            // Corrections of repeated drift back off, so each burst changes only a third of the Tenants.
            Kind::Drift => (tenant.0 % 3 == self.number % 3).then_some(Fault::Drift {
                tenant,
                object: Object::ALL[self.chance.random_range(0..Object::ALL.len())],
                gone: self.chance.random_bool(0.4),
            })?,
            _ => return None,
        };
        Some(fault)
    }

    fn some_hub(&mut self) -> Seat {
        let hubs = Seat::first(self.hubs);
        let drawn = self.chance.random_range(0..hubs.len());
        hubs.get(drawn).copied().unwrap_or(Seat::A)
    }

    fn some_way(&mut self) -> Way {
        match self.chance.random_range(0..5) {
            0 | 1 => Way::Cut,
            2 => Way::Slow(Duration::from_millis(self.chance.random_range(50..1500))),
            3 => Way::Swallowed,
            _ => Way::Frozen,
        }
    }

    fn some_answer(&mut self) -> Answered {
        Answered::ALL[self.chance.random_range(0..Answered::ALL.len())]
    }

    fn some_tenant(&mut self, draft: &Draft, live: bool) -> Option<Tenant> {
        let fit: Vec<usize> = (0..self.slots.len())
            .filter(|slot| {
                self.slots
                    .get(*slot)
                    .is_some_and(|state| state.live == live)
            })
            .filter(|slot| !draft.touched.contains(slot))
            .collect();
        if fit.is_empty() {
            return None;
        }
        fit.get(self.chance.random_range(0..fit.len()))
            .copied()
            .map(Tenant)
    }

    /// Adds the fault to the burst at a random time, if there is room.
    fn place(&mut self, fault: Fault, draft: &mut Draft) {
        let lasting = seconds(fault.lasting());
        let Some(room) = draft.length.checked_sub(lasting) else {
            return;
        };
        let at = self.chance.random_range(0..=room);
        // The aftermath may overlap with others' faults, but the fault itself may not.
        let until = at + seconds(fault.handled());
        let hold = fault.holds();
        let taken = draft
            .busy
            .iter()
            .any(|(other, from, to)| other.meets(&hold) && at < *to && *from < until);
        if taken {
            return;
        }
        draft.busy.push((hold, at, until));
        if let Some(Tenant(slot)) = fault.tenant() {
            draft.touched.insert(slot);
        }
        match &fault {
            Fault::Crd { edge } => {
                draft.crd.insert(*edge);
            }
            Fault::ForeignFinalizer { tenant } => {
                draft.held.insert(tenant.edge());
            }
            _ => {}
        }
        self.follow(&fault);
        draft.steps.push(Step {
            at: Duration::from_secs(at),
            fault,
        });
    }

    /// Updates the slots with the effects of the fault.
    fn follow(&mut self, fault: &Fault) {
        let (tenant, live, workspace) = match fault {
            Fault::Created { tenant, workspace } | Fault::Recreated { tenant, workspace } => {
                (tenant, true, Some(*workspace))
            }
            Fault::Deleted { tenant } => (tenant, false, None),
            Fault::WorkspaceSet { tenant } => (tenant, true, Some(Workspace::Named)),
            _ => return,
        };
        if let Some(slot) = self.slots.get_mut(tenant.0) {
            slot.live = live;
            slot.workspace = workspace.unwrap_or(slot.workspace);
        }
    }
}

fn seconds(duration: Duration) -> u64 {
    duration.as_secs()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn shape(seed: u64, tenants: usize, hubs: usize) -> Shape {
        Shape {
            seed,
            tenants,
            hubs,
        }
    }

    fn bursts(seed: u64, tenants: usize, count: usize) -> Vec<Burst> {
        Plan::new(shape(seed, tenants, 2)).take(count).collect()
    }

    #[test]
    fn plan_is_determined_by_seed() {
        assert_eq!(bursts(7, 50, 15), bursts(7, 50, 15));
        assert_ne!(bursts(7, 50, 15), bursts(8, 50, 15));
        let first = |seed| Plan::new(shape(seed, 50, 2)).first();
        assert_eq!(first(7), first(7));
    }

    #[test]
    fn a_longer_run_starts_like_a_shorter_one() {
        assert_eq!(bursts(3, 50, 20)[..5], bursts(3, 50, 5));
    }

    #[test]
    fn burst_outlasts_all_its_faults() {
        for seed in 0..50 {
            for burst in bursts(seed, 50, 10) {
                assert!((60..=120).contains(&burst.length.as_secs()), "{burst:?}");
                for step in &burst.steps {
                    let over = step.at + step.fault.lasting();
                    assert!(over <= burst.length, "seed {seed}: {step:?} of {burst:?}");
                }
                assert!(burst.steps.is_sorted_by_key(|step| step.at));
            }
        }
    }

    #[test]
    fn half_hour_covers_every_possible_fault_kind() {
        for (seed, hubs) in (1..=3).flat_map(|seed| [(seed, 1), (seed, 2)]) {
            let mut kinds: BTreeMap<Kind, usize> = BTreeMap::new();
            for burst in Plan::new(shape(seed, 50, hubs)).take(15) {
                for step in burst.steps {
                    *kinds.entry(step.fault.kind()).or_default() += 1;
                }
            }
            let made: Vec<Kind> = kinds.keys().copied().collect();
            let mut all: Vec<Kind> = Kind::of(hubs).map(|(kind, _)| kind).collect();
            all.sort();
            assert_eq!(made, all, "seed {seed}, {hubs} hubs: {kinds:?}");
        }
    }

    /// Returns overlapping pairs of faults of this hub's process.
    fn at_once(burst: &Burst, hub: Seat) -> Vec<Vec<&Step>> {
        let own = |step: &&Step| match &step.fault {
            Fault::HubKilled { hub: of, .. }
            | Fault::HubStopped { hub: of, .. }
            | Fault::HubFrozen { hub: of, .. } => *of == hub,
            Fault::LeadFrozen { .. } | Fault::HubsKilled { .. } | Fault::Version { .. } => true,
            _ => false,
        };
        let own: Vec<&Step> = burst.steps.iter().filter(own).collect();
        own.windows(2)
            .filter(|pair| match pair {
                [one, next] => next.at < one.at + one.fault.away(),
                _ => false,
            })
            .map(<[&Step]>::to_vec)
            .collect()
    }

    #[test]
    fn hub_faults_never_overlap_and_are_balanced() {
        let mut killed: BTreeMap<Seat, usize> = BTreeMap::new();
        for seed in 0..50 {
            for burst in bursts(seed, 50, 10) {
                for hub in Seat::first(2) {
                    assert_eq!(at_once(&burst, *hub), Vec::<Vec<&Step>>::new());
                }
                for step in &burst.steps {
                    if let Fault::HubKilled { hub, .. } = step.fault {
                        *killed.entry(hub).or_default() += 1;
                    }
                }
            }
        }
        let [a, b] = [Seat::A, Seat::B].map(|hub| killed[&hub]);
        assert!(a.abs_diff(b) * 4 < a + b, "{killed:?}");
    }

    #[test]
    fn frozen_leader_outlasts_its_lease() {
        for seed in 0..20 {
            for step in bursts(seed, 50, 10).iter().flat_map(|burst| &burst.steps) {
                if let Fault::LeadFrozen { away } = step.fault {
                    assert!(away > krypton_hub::leader::DURATION, "{step:?}");
                }
            }
        }
    }

    #[test]
    fn a_single_hub_plan_names_no_second_hub() {
        for seed in 0..20 {
            for burst in Plan::new(shape(seed, 50, 1)).take(10) {
                let text = format!("{burst:?}");
                assert!(
                    !text.contains("hub: B") && !text.contains("Some(B)"),
                    "{text}"
                );
            }
        }
    }

    #[test]
    fn only_live_tenants_are_deleted_and_absent_created() {
        for seed in 0..20 {
            let plan = Plan::new(shape(seed, 20, 2));
            let mut live: BTreeSet<Tenant> =
                plan.first().into_iter().map(|(tenant, _)| tenant).collect();
            for burst in plan.take(20) {
                let mut touched = BTreeSet::new();
                for step in &burst.steps {
                    let Some(tenant) = step.fault.tenant() else {
                        continue;
                    };
                    assert!(touched.insert(tenant), "two faults in a burst: {burst:?}");
                    match step.fault {
                        Fault::Created { .. } => assert!(live.insert(tenant)),
                        Fault::Deleted { .. } => assert!(live.remove(&tenant)),
                        _ => assert!(live.contains(&tenant), "{step:?}"),
                    }
                }
                for edge in [Edge::One, Edge::Two] {
                    let here = live.iter().filter(|tenant| tenant.edge() == edge);
                    assert!(here.count() >= 6, "{burst:?}");
                }
            }
        }
    }

    #[test]
    fn crd_deletion_avoids_edges_with_foreign_finalizer() {
        for seed in 0..50 {
            for burst in bursts(seed, 30, 10) {
                let places = |kind: Kind| -> BTreeSet<_> {
                    let of_kind = burst.steps.iter().filter(|step| step.fault.kind() == kind);
                    of_kind.filter_map(|step| step.fault.edge()).collect()
                };
                let crds = places(Kind::Crd);
                assert!(
                    crds.is_disjoint(&places(Kind::ForeignFinalizer)),
                    "{burst:?}"
                );
            }
        }
    }
}
