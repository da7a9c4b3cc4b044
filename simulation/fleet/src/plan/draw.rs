//! Draws a plan from a seed. Each seed enables a random subset of the kinds of steps (swarm testing).

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt as _, SeedableRng as _};

use super::{
    Access, Action, Chart, DeploymentAction, Edge, FOREVER, HOME, LinkFault, MemberAction, Plan,
    Scope, Seat, ServerFault, Settings, Step, Strike, TenantAction, Verbs,
};
use crate::conductor::Millis;

/// How large plans are.
pub(super) struct Size {
    edges: RangeInclusive<u32>,
    tenants: RangeInclusive<u32>,
    /// In seconds.
    chaos: RangeInclusive<Millis>,
    /// Mean time between two steps.
    between: Millis,
    quiet: Millis,
}

pub(super) const FULL: Size = Size {
    edges: 1..=3,
    tenants: 2..=6,
    chaos: 30..=300,
    between: 3_000,
    quiet: 90_000,
};
pub(super) const SHORT: Size = Size {
    edges: 1..=1,
    tenants: 1..=2,
    chaos: 5..=25,
    between: 2_000,
    quiet: 20_000,
};
/// Pause between two faults of one target.
const APART: Millis = 1_000;
const LONGEST: Millis = 90_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Life,
    Edit,
    Pause,
    Foreign,
    Damage,
    Crd,
    Anchor,
    Kubeconfig,
    Member,
    Deployment,
    Chart,
    Values,
    Crash,
    Stop,
    AtRequest,
    Freeze,
    Suspend,
    Skew,
    Cut,
    SlowLink,
    HalfOpen,
    Days,
    Certificates,
    Copy,
    Twin,
    Outage,
    BadAnswers,
    Jobs,
    Watches,
    Restore,
    ServerClock,
}

const KINDS: [Kind; 31] = [
    Kind::Life,
    Kind::Edit,
    Kind::Pause,
    Kind::Foreign,
    Kind::Damage,
    Kind::Crd,
    Kind::Anchor,
    Kind::Kubeconfig,
    Kind::Member,
    Kind::Deployment,
    Kind::Chart,
    Kind::Values,
    Kind::Crash,
    Kind::Stop,
    Kind::AtRequest,
    Kind::Freeze,
    Kind::Suspend,
    Kind::Skew,
    Kind::Cut,
    Kind::SlowLink,
    Kind::HalfOpen,
    Kind::Days,
    Kind::Certificates,
    Kind::Copy,
    Kind::Twin,
    Kind::Outage,
    Kind::BadAnswers,
    Kind::Jobs,
    Kind::Watches,
    Kind::Restore,
    Kind::ServerClock,
];

/// Returns the plan of a seed.
pub(super) fn plan(seed: u64, size: &Size) -> Plan {
    // The conductor seeds its own generators with other values.
    let mut chance = Xoshiro256PlusPlus::seed_from_u64(seed ^ 0x706c_616e);
    let settings = settings(&mut chance, size);
    let mut kinds: Vec<Kind> = KINDS
        .into_iter()
        .filter(|_| chance.random_range(0..10) < 4)
        .collect();
    if kinds.is_empty() {
        kinds.push(Kind::Crash);
    }
    let mut draft = Draft {
        live: settings
            .tenants
            .iter()
            .map(|seat| (key(&seat.cluster, &seat.tenant), true))
            .collect(),
        deployments: BTreeMap::new(),
        sources_change: kinds.contains(&Kind::Kubeconfig),
        members_stay: !kinds.contains(&Kind::Restore) && !kinds.contains(&Kind::Member),
        busy: Vec::new(),
        steps: Vec::new(),
        number: 0,
        version: 1,
        settings,
        chance,
    };
    if seed % 4 == 3 {
        draft.permanent();
    }
    let mut at = draft.chance.random_range(0..size.between);
    while at < draft.settings.chaos {
        let kind = draft.one_of(&kinds);
        if let Some(action) = draft.action(kind, at) {
            draft.place(at, action);
        }
        at += draft.chance.random_range(1..2 * size.between);
    }
    draft.finish();
    let Draft {
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

fn settings(chance: &mut Xoshiro256PlusPlus, size: &Size) -> Settings {
    let edges: Vec<Edge> = (1..=chance.random_range(size.edges.clone()))
        .map(|number| Edge {
            name: format!("edge-{number}"),
            access: match chance.random_range(0..6) {
                0 | 1 => Access::Kubeconfig,
                2 => Access::Both,
                _ => Access::Agent,
            },
        })
        .collect();
    let self_cluster = chance.random_bool(0.5);
    let tenants = (0..chance.random_range(size.tenants.clone())).map(|number| {
        let edge = chance.random_range(0..edges.len());
        let edge = edges.get(edge).map(|edge| edge.name.clone());
        let edge = edge.unwrap_or_default();
        let (cluster, placed) = match chance.random_range(0..4) {
            0 => (HOME.to_owned(), Some(edge)),
            1 if self_cluster => (HOME.to_owned(), None),
            _ => (edge, None),
        };
        Seat {
            tenant: format!("t{number}"),
            cluster,
            placed,
        }
    });
    let tenants = tenants.collect();
    let charts = [
        Chart::Plain,
        Chart::Hooks,
        Chart::Hooks,
        Chart::FailingUpgrade,
        Chart::Slow,
    ];
    let chart = charts.get(chance.random_range(0..charts.len())).copied();
    Settings {
        hubs: chance.random_range(1..=2),
        edges,
        tenants,
        self_cluster,
        chaos: chance.random_range(size.chaos.clone()) * 1_000,
        quiet: size.quiet,
        at_start: None,
        chart: chart.unwrap_or(Chart::Plain),
    }
}

/// A plan during its generation.
struct Draft {
    settings: Settings,
    chance: Xoshiro256PlusPlus,
    /// Whether each Tenant of a seat exists.
    live: BTreeMap<(String, String), bool>,
    deployments: BTreeMap<String, String>,
    /// Whether no restore and no person removes or bans a member. A hub with an older CA locks out the agents that have
    /// renewed, and a rotation does not wait for banned members.
    members_stay: bool,
    /// Whether people change Secrets with kubeconfigs.
    sources_change: bool,
    /// Targets with the times of their faults.
    busy: Vec<(String, Millis, Millis)>,
    steps: Vec<Step>,
    /// Makes the content of edits unique.
    number: u32,
    version: u32,
}

impl Draft {
    fn one_of<T: Clone>(&mut self, all: &[T]) -> T {
        let index = self.chance.random_range(0..all.len());
        all.get(index).unwrap_or(&all[0]).clone()
    }

    /// Adds a step unless a fault of the same target is active.
    fn place(&mut self, at: Millis, action: Action) {
        let until = at.saturating_add(action.length().unwrap_or_default());
        let Some(target) = target(&action) else {
            self.steps.push(Step { at, action });
            return;
        };
        let free = |(name, from, to): &(String, Millis, Millis)| {
            *name != target || until + APART < *from || at > to.saturating_add(APART)
        };
        if until == FOREVER || self.busy.iter().all(free) {
            self.busy.push((target, at, until));
            self.steps.push(Step { at, action });
        }
    }

    /// One member is separated for good.
    fn permanent(&mut self) {
        let edges = self.settings.edges.clone();
        let edge = self.one_of(&edges);
        let at = self.chance.random_range(0..self.settings.chaos / 2);
        let action = match (edge.agent(), self.chance.random_bool(0.5)) {
            (Some(agent), true) => Action::Crash {
                host: agent,
                restart: FOREVER,
            },
            _ => Action::Server {
                cluster: edge.name,
                fault: self.one_of(&[ServerFault::Down, ServerFault::Hangs]),
                scope: Scope::default(),
                length: FOREVER,
            },
        };
        self.place(at, action);
    }

    /// Ends what people have suspended.
    fn finish(&mut self) {
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
        let ends = open.into_values().map(|action| Step { at: end, action });
        self.steps.extend(ends);
    }

    fn action(&mut self, kind: Kind, at: Millis) -> Option<Action> {
        match kind {
            Kind::Life | Kind::Edit | Kind::Pause | Kind::Foreign | Kind::Damage => {
                self.tenant(kind)
            }
            Kind::Crd => Some(Action::DeleteCrd {
                cluster: self.any_cluster(),
            }),
            Kind::Anchor => Some(Action::DeleteAnchor {
                cluster: self.any_cluster(),
            }),
            Kind::Kubeconfig => self.kubeconfig(at),
            Kind::Member => self.member(),
            Kind::Deployment => self.deployment(),
            Kind::Chart => {
                self.version += 1;
                let version = self.version;
                Some(Action::ChartVersion { version })
            }
            Kind::Values => Some(Action::Values {
                number: self.next_number(),
            }),
            Kind::Crash
            | Kind::Stop
            | Kind::AtRequest
            | Kind::Freeze
            | Kind::Suspend
            | Kind::Skew => self.host(kind, at),
            Kind::Cut | Kind::SlowLink => self.link(kind, at),
            Kind::HalfOpen => self.half_open(),
            // An agent renews after five days, and the hub after sixty. Their certificates last seven and ninety.
            Kind::Days => Some(Action::PassDays {
                days: self.one_of(&[1, 5, 6, 6, 8, 61, 91]),
            }),
            Kind::Certificates => self.certificates(),
            Kind::Copy => Some(Action::CopyAgent {
                length: self.length(at)?,
                edge: self.edge_with(|edge| edge.agent().is_some())?,
            }),
            Kind::Twin => self.twin(at),
            Kind::Outage
            | Kind::BadAnswers
            | Kind::Jobs
            | Kind::Watches
            | Kind::Restore
            | Kind::ServerClock => self.server(kind, at),
        }
    }

    fn tenant(&mut self, kind: Kind) -> Option<Action> {
        let seats = self.settings.tenants.clone();
        let seat = self.one_of(&seats);
        let exists = self.live.get(&key(&seat.cluster, &seat.tenant)).copied();
        let number = self.next_number();
        let placed = seat.placed.clone();
        let what = match kind {
            _ if exists != Some(true) => match kind {
                Kind::Life => TenantAction::Create { placed },
                _ => return None,
            },
            Kind::Life => self.one_of(&[
                TenantAction::Delete,
                TenantAction::Delete,
                TenantAction::Delete,
                TenantAction::Orphan,
            ]),
            Kind::Edit => self.one_of(&[
                TenantAction::Edit { number },
                TenantAction::Edit { number },
                TenantAction::Relabel { number },
                TenantAction::Retry { number },
            ]),
            Kind::Pause => self.one_of(&[TenantAction::Pause, TenantAction::Resume]),
            Kind::Foreign => self.one_of(&[TenantAction::AddForeign, TenantAction::RemoveForeign]),
            _ => self.one_of(&[
                TenantAction::DeleteRelease,
                TenantAction::DeleteRelease,
                TenantAction::DamageRelease,
                TenantAction::ForgeRelease,
                TenantAction::DeleteObject,
                TenantAction::DeleteObject,
                TenantAction::DeleteNamespace,
                TenantAction::AddOccupant,
            ]),
        };
        let live = match what {
            TenantAction::Create { .. } => true,
            TenantAction::Delete | TenantAction::Orphan => false,
            _ => exists?,
        };
        self.live.insert(key(&seat.cluster, &seat.tenant), live);
        Some(Action::Tenant {
            cluster: seat.cluster,
            tenant: seat.tenant,
            what,
        })
    }

    fn kubeconfig(&mut self, at: Millis) -> Option<Action> {
        let length = self.length(at)?;
        let member = self.edge_with(|edge| edge.access == Access::Kubeconfig)?;
        let what = self.one_of(&[
            MemberAction::DamageKubeconfig { length },
            MemberAction::DeleteKubeconfig { length },
            MemberAction::RelabelKubeconfig { length },
        ]);
        Some(Action::Member { member, what })
    }

    fn member(&mut self) -> Option<Action> {
        let edges = self.settings.edges.clone();
        let edge = self.one_of(&edges);
        let what = self.one_of(&[
            MemberAction::Pause,
            MemberAction::Resume,
            MemberAction::Ban,
            MemberAction::Unban,
            MemberAction::Delete { uninstall: false },
            MemberAction::Delete { uninstall: true },
        ]);
        // An agent whose EdgeCluster was deleted needs another invitation.
        if edge.agent().is_some() && matches!(what, MemberAction::Delete { .. }) {
            return None;
        }
        Some(Action::Member {
            member: edge.name,
            what,
        })
    }

    fn deployment(&mut self) -> Option<Action> {
        let name = self.one_of(&["d0".to_owned(), "d1".to_owned()]);
        // Whether a KryptonDeployment names the Secret of a member with both depends on which came first.
        let region = self.edge_with(|edge| edge.access != Access::Both)?;
        let number = self.next_number();
        let what = if self.deployments.contains_key(&name) {
            self.one_of(&[
                DeploymentAction::Edit { number },
                DeploymentAction::Move {
                    region: region.clone(),
                },
                DeploymentAction::Delete,
            ])
        } else {
            DeploymentAction::Create {
                region: region.clone(),
            }
        };
        match what {
            DeploymentAction::Delete => self.deployments.remove(&name),
            _ => self.deployments.insert(name.clone(), region),
        };
        Some(Action::Deployment { name, what })
    }

    fn host(&mut self, kind: Kind, at: Millis) -> Option<Action> {
        let hosts = self.settings.hosts();
        let host = self.one_of(&hosts);
        let length = self.length(at)?;
        Some(match kind {
            Kind::Crash => Action::Crash {
                host,
                restart: length,
            },
            Kind::AtRequest => {
                let limit = [3, 30, 300];
                let limit = self.one_of(&limit);
                let crash = Strike::Crash {
                    restart: length.min(10_000),
                };
                Action::AtRequest {
                    host,
                    nth: self.chance.random_range(1..=limit),
                    strike: self.one_of(&[crash, crash, Strike::Fail, Strike::LoseAnswer]),
                }
            }
            Kind::Stop => Action::Stop { host, length },
            Kind::Freeze => Action::Freeze { host, length },
            Kind::Suspend => Action::Suspend { host, length },
            _ => Action::Skew {
                host,
                by: self.chance.random_range(-7_200_000..=7_200_000),
            },
        })
    }

    fn link(&mut self, kind: Kind, at: Millis) -> Option<Action> {
        let length = self.length(at)?;
        let (from, to) = self.any_link();
        let (from, to) = match self.chance.random_bool(0.5) {
            true => (from, to),
            false => (to, from),
        };
        let delay = self.chance.random_range(20..=4_000);
        let loss = self.chance.random_range(10..=500);
        let fault = match kind {
            Kind::Cut => self.one_of(&[LinkFault::Cut, LinkFault::Cut, LinkFault::Refuse]),
            _ => self.one_of(&[LinkFault::Delay(delay), LinkFault::Loss(loss)]),
        };
        Some(Action::Link {
            from,
            to,
            both: self.chance.random_bool(0.6),
            fault,
            length,
        })
    }

    fn certificates(&mut self) -> Option<Action> {
        if self.members_stay && self.chance.random_bool(0.3) {
            return Some(Action::RotateCa);
        }
        let member = self.edge_with(|edge| edge.agent().is_some())?;
        Some(Action::Member {
            member,
            what: MemberAction::Rejoin,
        })
    }

    fn twin(&mut self, at: Millis) -> Option<Action> {
        let length = self.length(at)?;
        let edges = self.settings.edges.clone();
        let edge = self.one_of(&edges);
        let may_change = edge.access == Access::Kubeconfig && self.sources_change;
        // After its member has gone, the twin rightly acts.
        let what = self.one_of(&[
            MemberAction::AddTwin { length },
            MemberAction::AddElsewhere { length },
        ]);
        (self.members_stay && !may_change).then_some(Action::Member {
            member: edge.name,
            what,
        })
    }

    /// Only the connection between an agent and a hub. Watches of API servers notice the fault after 290 s.
    fn half_open(&mut self) -> Option<Action> {
        let edge = self.edge_with(|edge| edge.agent().is_some())?;
        let hub = format!("hub-{}", self.chance.random_range(0..self.settings.hubs));
        let agent = format!("agent-{edge}");
        let (from, to) = match self.chance.random_bool(0.5) {
            true => (agent, hub),
            false => (hub, agent),
        };
        Some(Action::HalfOpen { from, to })
    }

    fn server(&mut self, kind: Kind, at: Millis) -> Option<Action> {
        let cluster = self.any_cluster();
        let length = self.length(at)?;
        Some(match kind {
            Kind::Outage | Kind::BadAnswers | Kind::Jobs => {
                let faults: &[ServerFault] = match kind {
                    Kind::Outage => &[ServerFault::Down, ServerFault::Hangs],
                    Kind::Jobs => &[ServerFault::FailingJobs],
                    _ => &[
                        ServerFault::TooManyRequests,
                        ServerFault::InternalError,
                        ServerFault::Unavailable,
                        ServerFault::Html,
                        ServerFault::Unauthorized,
                        ServerFault::Forbidden,
                        ServerFault::NotFound,
                        ServerFault::Gone,
                        ServerFault::BadGateway,
                        ServerFault::EmptyLists,
                        ServerFault::CutBodies,
                    ],
                };
                let fault = self.one_of(faults);
                Action::Server {
                    cluster,
                    fault,
                    scope: self.scope(kind, fault),
                    length,
                }
            }
            Kind::Watches => match self.chance.random_bool(0.5) {
                true => Action::EndWatches { cluster },
                false => Action::Compact { cluster },
            },
            Kind::Restore => Action::Restore {
                cluster,
                after: length.min(20_000),
            },
            _ => Action::ServerClock {
                cluster,
                by: self.chance.random_range(-120_000..=120_000),
                length,
            },
        })
    }

    fn scope(&mut self, kind: Kind, fault: ServerFault) -> Scope {
        // Without a view of the releases, Krypton rightly finds nothing to uninstall.
        let resources: &[&str] = match fault {
            ServerFault::EmptyLists => &["tenants", "namespaces", "customresourcedefinitions"],
            _ => &[
                "tenants",
                "namespaces",
                "customresourcedefinitions",
                "secrets",
                "leases",
            ],
        };
        let one = vec![self.one_of(resources).to_owned()];
        let some = fault == ServerFault::EmptyLists || self.chance.random_bool(0.5);
        match kind {
            Kind::BadAnswers => Scope {
                verbs: self.one_of(&[Verbs::All, Verbs::Gets, Verbs::Lists]),
                resources: if some { one } else { Vec::new() },
            },
            _ => Scope::default(),
        }
    }

    /// A length that ends before the chaos does.
    fn length(&mut self, at: Millis) -> Option<Millis> {
        let most = self.settings.chaos.checked_sub(at + APART)?.min(LONGEST);
        // Short and long faults are equally frequent.
        let limit = self.one_of(&[2_000, 10_000, 40_000, LONGEST]).min(most);
        (limit > 200).then(|| self.chance.random_range(100..=limit))
    }

    fn any_cluster(&mut self) -> String {
        let clusters = self.settings.clusters();
        self.one_of(&clusters)
    }

    /// A host and a cluster or hub that it talks to.
    fn any_link(&mut self) -> (String, String) {
        let hub = format!("hub-{}", self.chance.random_range(0..self.settings.hubs));
        let edges = self.settings.edges.clone();
        let edge = self.one_of(&edges);
        match (edge.agent(), self.chance.random_range(0..3)) {
            (_, 0) => (hub, HOME.to_owned()),
            (Some(agent), 1) => (agent, hub),
            (Some(agent), _) => (agent, edge.name),
            (None, _) => (hub, edge.name),
        }
    }

    fn edge_with(&mut self, fits: fn(&Edge) -> bool) -> Option<String> {
        let edges = self.settings.edges.iter();
        let edges: Vec<String> = edges
            .filter(|edge| fits(edge))
            .map(|edge| edge.name.clone())
            .collect();
        (!edges.is_empty()).then(|| self.one_of(&edges))
    }

    fn next_number(&mut self) -> u32 {
        self.number += 1;
        self.number
    }
}

fn key(cluster: &str, tenant: &str) -> (String, String) {
    (cluster.to_owned(), tenant.to_owned())
}

/// The target whose faults exclude each other. `None` if the action has no duration.
fn target(action: &Action) -> Option<String> {
    Some(match action {
        Action::Crash { host, .. }
        | Action::Stop { host, .. }
        | Action::AtRequest { host, .. }
        | Action::Freeze { host, .. }
        | Action::Suspend { host, .. } => format!("host {host}"),
        // The conductor holds one state for each direction.
        Action::Link { from, to, .. } if from < to => format!("link {from} {to}"),
        Action::Link { from, to, .. } => format!("link {to} {from}"),
        Action::Server { cluster, .. }
        | Action::Restore { cluster, .. }
        | Action::ServerClock { cluster, .. } => format!("server {cluster}"),
        Action::CopyAgent { edge, .. } => format!("copy {edge}"),
        Action::Member { member, what } => {
            what.length()?;
            format!("kubeconfig {member}")
        }
        _ => return None,
    })
}

/// The subject that a step suspends with the opposite action, or continues (`None`).
fn suspension(action: &Action) -> Option<(String, Option<Action>)> {
    match action {
        Action::Tenant {
            cluster,
            tenant,
            what,
        } => {
            let opposite = match what {
                TenantAction::Pause => ("pause", Some(TenantAction::Resume)),
                TenantAction::Resume => ("pause", None),
                TenantAction::AddForeign => ("foreign", Some(TenantAction::RemoveForeign)),
                TenantAction::RemoveForeign => ("foreign", None),
                _ => return None,
            };
            let (subject, opposite) = opposite;
            let opposite = opposite.map(|what| Action::Tenant {
                cluster: cluster.clone(),
                tenant: tenant.clone(),
                what,
            });
            Some((format!("{subject} {cluster}/{tenant}"), opposite))
        }
        Action::Member { member, what } => {
            let (subject, opposite) = match what {
                MemberAction::Pause => ("pause", Some(MemberAction::Resume)),
                MemberAction::Resume => ("pause", None),
                MemberAction::Ban => ("ban", Some(MemberAction::Unban)),
                MemberAction::Unban => ("ban", None),
                _ => return None,
            };
            let opposite = opposite.map(|what| Action::Member {
                member: member.clone(),
                what,
            });
            Some((format!("{subject} {member}"), opposite))
        }
        _ => None,
    }
}
