//! Draws a plan from a seed. Each seed enables a random subset of the kinds of steps (swarm testing).

mod actions;

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt as _, SeedableRng as _};

use super::{
    Access, Action, Chart, Edge, FOREVER, HOME, MemberAction, Plan, PlanStep, PlannedTenant, Scope,
    ServerFault, Settings, TenantAction, Verbs,
};
use crate::time::Millis;

/// The size of plans.
pub(super) struct PlanSize {
    edges: RangeInclusive<u32>,
    /// One of these is their number.
    tenants: &'static [u32],
    charts: &'static [Chart],
    /// Probability of a second hub.
    second_hub: f64,
    /// Probability that the home cluster is a member.
    self_cluster: f64,
    /// Probability that the CRDs exist before the start.
    crds_exist: f64,
    /// In seconds.
    chaos: RangeInclusive<Millis>,
    /// Mean time between two steps.
    mean_pause: Millis,
    quiet: Millis,
}

pub(super) const FULL: PlanSize = PlanSize {
    edges: 1..=3,
    tenants: &[2, 3, 4, 5, 6],
    charts: &[
        Chart::Plain,
        Chart::Hooks,
        Chart::Hooks,
        Chart::FailingUpgrade,
        Chart::Slow,
    ],
    second_hub: 0.5,
    self_cluster: 0.5,
    crds_exist: 0.25,
    chaos: 30..=300,
    mean_pause: 3_000,
    quiet: 90_000,
};
pub(super) const SHORT: PlanSize = PlanSize {
    edges: 1..=1,
    tenants: &[1, 1, 1, 1, 2],
    charts: &[
        Chart::Plain,
        Chart::Plain,
        Chart::Plain,
        Chart::Plain,
        Chart::Hooks,
        Chart::Hooks,
        Chart::Hooks,
        Chart::Hooks,
        Chart::FailingUpgrade,
        Chart::FailingUpgrade,
        Chart::FailingUpgrade,
        Chart::Slow,
    ],
    second_hub: 0.2,
    self_cluster: 0.25,
    crds_exist: 0.85,
    chaos: 4..=10,
    mean_pause: 1_500,
    quiet: 6_000,
};
/// Pause between two faults of one target.
const MIN_PAUSE: Millis = 1_000;
/// An agent lies for a time in so many of 100 plans with an agent.
const HOSTILE_PLANS: u32 = 20;
/// Shortest and longest time of that. The shortest chaos has room for the shortest time.
const HOSTILE_LENGTHS: [Millis; 2] = [1_000, 90_000];
/// Other users have created an object in the workspace before so many of 100 deletions of Tenants.
const OCCUPIED_DELETIONS: u32 = 20;
/// People delete the epoch in so many of 100 plans.
const EPOCH_DELETION_PLANS: u32 = 10;

/// Defines the kinds of steps, and their list.
macro_rules! step_kinds {
    ($($kind:ident,)+) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        enum StepKind {
            $($kind,)+
        }

        const STEP_KINDS: &[StepKind] = &[$(StepKind::$kind,)+];
    };
}

step_kinds! {
    TenantLifecycle,
    TenantEdit,
    TenantPause,
    ForeignFields,
    ReleaseDamage,
    CrdDeletion,
    AnchorDeletion,
    Kubeconfig,
    Member,
    Deployment,
    ChartVersion,
    Values,
    Crash,
    Stop,
    AtRequest,
    Freeze,
    Suspend,
    Skew,
    LinkCut,
    SlowLink,
    HalfOpen,
    PassDays,
    Certificates,
    AgentCopy,
    Twin,
    Outage,
    BadResponses,
    FailingJobs,
    Watches,
    Restore,
    ServerClock,
}

/// Returns the plan of a seed.
pub(super) fn plan(seed: u64, size: &PlanSize) -> Plan {
    // The conductor seeds its own generators with other values.
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed ^ 0x706c_616e);
    let settings = Settings {
        // A separate generator leaves all other draws unchanged.
        long_leader_lease: Xoshiro256PlusPlus::seed_from_u64(seed ^ 0x6c65_6173).random_bool(0.5),
        ..draw_settings(&mut rng, size)
    };
    let mut kinds: Vec<StepKind> = STEP_KINDS
        .iter()
        .copied()
        .filter(|_| rng.random_range(0..10) < 4)
        .collect();
    if kinds.is_empty() {
        kinds.push(StepKind::Crash);
    }
    let mut draft = PlanDraft {
        existing: settings
            .tenants
            .iter()
            .map(|tenant| (tenant_key(&tenant.cluster, &tenant.name), true))
            .collect(),
        deployment_regions: BTreeMap::new(),
        kubeconfigs_change: kinds.contains(&StepKind::Kubeconfig),
        members_are_kept: !kinds.contains(&StepKind::Restore) && !kinds.contains(&StepKind::Member),
        fault_periods: Vec::new(),
        steps: Vec::new(),
        last_edit: 0,
        chart_version: 1,
        settings,
        rng,
    };
    if seed % 4 == 3 {
        draft.add_permanent_fault();
    }
    let mut at = draft.rng.random_range(0..size.mean_pause);
    while at < draft.settings.chaos {
        let kind = draft.pick(&kinds);
        if let Some(action) = draft.draw_action(kind, at) {
            draft.add_step(at, action);
        }
        at += draft.rng.random_range(1..2 * size.mean_pause);
    }
    draft.add_hostile_agent(seed);
    draft.add_occupants(seed);
    draft.add_epoch_deletion(seed);
    draft.narrow_list_faults(seed);
    draft.end_suspensions();
    let PlanDraft {
        settings,
        mut steps,
        ..
    } = draft;
    steps.sort_by_key(|step| step.at);
    Plan {
        seed,
        settings,
        steps,
    }
}

fn draw_settings(rng: &mut Xoshiro256PlusPlus, size: &PlanSize) -> Settings {
    let edges: Vec<Edge> = (1..=rng.random_range(size.edges.clone()))
        .map(|number| Edge {
            name: format!("edge-{number}"),
            access: match rng.random_range(0..6) {
                0 | 1 => Access::Kubeconfig,
                2 => Access::Both,
                _ => Access::Agent,
            },
        })
        .collect();
    let self_cluster = rng.random_bool(size.self_cluster);
    let tenants = (0..pick(rng, size.tenants)).map(|number| {
        let edge = rng.random_range(0..edges.len());
        let edge = edges.get(edge).map(|edge| edge.name.clone());
        let edge = edge.unwrap_or_default();
        let (cluster, placed_on) = match rng.random_range(0..4) {
            0 => (HOME.to_owned(), Some(edge)),
            1 if self_cluster => (HOME.to_owned(), None),
            _ => (edge, None),
        };
        PlannedTenant {
            name: format!("t{number}"),
            cluster,
            placed_on,
        }
    });
    let tenants = tenants.collect();
    let chart = pick(rng, size.charts);
    Settings {
        hubs: 1 + u32::from(rng.random_bool(size.second_hub)),
        edges,
        tenants,
        self_cluster,
        crds_exist: rng.random_bool(size.crds_exist),
        long_leader_lease: false,
        chaos: rng.random_range(size.chaos.clone()) * 1_000,
        quiet: size.quiet,
        at_start: None,
        chart,
    }
}

/// A plan during its generation.
struct PlanDraft {
    settings: Settings,
    rng: Xoshiro256PlusPlus,
    /// Whether each Tenant of the settings exists, by cluster and name.
    existing: BTreeMap<(String, String), bool>,
    deployment_regions: BTreeMap<String, String>,
    /// Whether no restore and no user removes or bans a member. A hub with an older CA locks out the agents that have
    /// renewed, and a rotation does not wait for banned members.
    members_are_kept: bool,
    /// Whether people change Secrets with kubeconfigs.
    kubeconfigs_change: bool,
    /// Targets with the start and end of their faults.
    fault_periods: Vec<(String, Millis, Millis)>,
    steps: Vec<PlanStep>,
    /// Number of the last edit, which makes the content of edits unique.
    last_edit: u32,
    chart_version: u32,
}

fn pick<T: Clone>(rng: &mut Xoshiro256PlusPlus, all: &[T]) -> T {
    let index = rng.random_range(0..all.len());
    all.get(index).unwrap_or(&all[0]).clone()
}

impl PlanDraft {
    fn pick<T: Clone>(&mut self, all: &[T]) -> T {
        pick(&mut self.rng, all)
    }

    /// Adds a step unless a fault of the same target is active.
    fn add_step(&mut self, at: Millis, action: Action) {
        let until = at.saturating_add(action.length().unwrap_or_default());
        let Some(target) = exclusive_target(&action) else {
            self.steps.push(PlanStep { at, action });
            return;
        };
        let is_free = |(name, from, to): &(String, Millis, Millis)| {
            *name != target || until + MIN_PAUSE < *from || at > to.saturating_add(MIN_PAUSE)
        };
        if until == FOREVER || self.fault_periods.iter().all(is_free) {
            self.fault_periods.push((target, at, until));
            self.steps.push(PlanStep { at, action });
        }
    }

    /// Separates one member permanently.
    fn add_permanent_fault(&mut self) {
        let edges = self.settings.edges.clone();
        let edge = self.pick(&edges);
        let at = self.rng.random_range(0..self.settings.chaos / 2);
        let action = match (edge.agent_host(), self.rng.random_bool(0.5)) {
            (Some(agent), true) => Action::Crash {
                host: agent,
                restart: FOREVER,
            },
            _ => Action::Server {
                cluster: edge.name,
                fault: self.pick(&[ServerFault::Down, ServerFault::Hangs]),
                scope: Scope::default(),
                length: FOREVER,
            },
        };
        self.add_step(at, action);
    }

    /// Lets an agent lie for a time in some plans. A separate generator leaves all other draws unchanged.
    fn add_hostile_agent(&mut self, seed: u64) {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed ^ 0x686f_7374);
        let edges = self.settings.edges.iter();
        let with_agent: Vec<String> = edges
            .filter(|edge| edge.agent_host().is_some())
            .map(|edge| edge.name.clone())
            .collect();
        if with_agent.is_empty() || rng.random_range(0..100) >= HOSTILE_PLANS {
            return;
        }
        let at = rng.random_range(0..self.settings.chaos / 2);
        let [shortest, longest] = HOSTILE_LENGTHS;
        let longest = longest.min(self.settings.chaos - at - MIN_PAUSE);
        let action = Action::HostileAgent {
            edge: with_agent[rng.random_range(0..with_agent.len())].clone(),
            length: rng.random_range(shortest..=longest),
        };
        self.add_step(at, action);
    }

    /// Lets other users create objects in some workspaces shortly before people delete the Tenants. A separate generator
    /// leaves all other draws unchanged.
    fn add_occupants(&mut self, seed: u64) {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed ^ 0x6f63_6375);
        for step in self.steps.clone() {
            let Action::Tenant {
                cluster,
                tenant,
                action: TenantAction::Delete,
            } = step.action
            else {
                continue;
            };
            if rng.random_range(0..100) >= OCCUPIED_DELETIONS {
                continue;
            }
            let at = step.at.saturating_sub(rng.random_range(1_000..=5_000));
            let action = Action::Tenant {
                cluster,
                tenant,
                action: TenantAction::AddOccupant,
            };
            self.add_step(at, action);
        }
    }

    /// Lets people delete the epoch in some plans. A separate generator leaves all other draws unchanged.
    fn add_epoch_deletion(&mut self, seed: u64) {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed ^ 0x6570_6f63);
        if rng.random_range(0..100) < EPOCH_DELETION_PLANS {
            let at = rng.random_range(0..self.settings.chaos);
            self.add_step(at, Action::DeleteEpoch);
        }
    }

    /// Limits some faults of lists to lists of all namespaces. A separate generator leaves all other draws unchanged.
    fn narrow_list_faults(&mut self, seed: u64) {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed ^ 0x7769_6465);
        for step in &mut self.steps {
            if let Action::Server { scope, .. } = &mut step.action
                && scope.verbs == Verbs::Lists
                && rng.random_bool(0.5)
            {
                scope.verbs = Verbs::WideLists;
            }
        }
    }

    /// Ends the suspensions by people.
    fn end_suspensions(&mut self) {
        let end = self.settings.chaos;
        self.steps.sort_by_key(|step| step.at);
        let mut open: BTreeMap<String, Action> = BTreeMap::new();
        for step in &self.steps {
            let Some((key, inverse)) = suspension(&step.action) else {
                continue;
            };
            match inverse {
                Some(inverse) => open.insert(key, inverse),
                None => open.remove(&key),
            };
        }
        let ending_steps = open
            .into_values()
            .map(|action| PlanStep { at: end, action });
        self.steps.extend(ending_steps);
    }
}

fn tenant_key(cluster: &str, tenant: &str) -> (String, String) {
    (cluster.to_owned(), tenant.to_owned())
}

/// The target whose faults exclude each other. `None` if the action has no duration.
fn exclusive_target(action: &Action) -> Option<String> {
    Some(match action {
        Action::Crash { host, .. }
        | Action::Stop { host, .. }
        | Action::AtRequest { host, .. }
        | Action::Freeze { host, .. }
        | Action::Suspend { host, .. } => format!("host {host}"),
        Action::HostileAgent { edge, .. } => format!("host agent-{edge}"),
        // The conductor holds one state for each direction.
        Action::Link { from, to, .. } if from < to => format!("link {from} {to}"),
        Action::Link { from, to, .. } => format!("link {to} {from}"),
        Action::Server { cluster, .. }
        | Action::Restore { cluster, .. }
        | Action::ServerClock { cluster, .. } => format!("server {cluster}"),
        Action::CopyAgent { edge, .. } => format!("copy {edge}"),
        Action::Member { member, .. } => {
            action.length()?;
            format!("kubeconfig {member}")
        }
        _ => return None,
    })
}

/// The object that a step suspends, with the opposite action, or that it resumes (`None`).
fn suspension(action: &Action) -> Option<(String, Option<Action>)> {
    match action {
        Action::Tenant {
            cluster,
            tenant,
            action,
        } => {
            let (kind, opposite) = match action {
                TenantAction::Pause => ("pause", Some(TenantAction::Resume)),
                TenantAction::Resume => ("pause", None),
                TenantAction::AddForeign => ("foreign", Some(TenantAction::RemoveForeign)),
                TenantAction::RemoveForeign => ("foreign", None),
                _ => return None,
            };
            let opposite = opposite.map(|action| Action::Tenant {
                cluster: cluster.clone(),
                tenant: tenant.clone(),
                action,
            });
            Some((format!("{kind} {cluster}/{tenant}"), opposite))
        }
        Action::Member { member, action } => {
            let (kind, opposite) = match action {
                MemberAction::Pause => ("pause", Some(MemberAction::Resume)),
                MemberAction::Resume => ("pause", None),
                MemberAction::Ban => ("ban", Some(MemberAction::Unban)),
                MemberAction::Unban => ("ban", None),
                _ => return None,
            };
            let opposite = opposite.map(|action| Action::Member {
                member: member.clone(),
                action,
            });
            Some((format!("{kind} {member}"), opposite))
        }
        _ => None,
    }
}
