//! Draws one action of a kind of step: its target, what happens to it, and for how long.

use rand::RngExt as _;

use super::{MIN_PAUSE, PlanDraft, StepKind, tenant_key};
use crate::plan::{
    Access, Action, DeploymentAction, Edge, HOME, LinkFault, MemberAction, RequestFault, Scope,
    ServerFault, TenantAction, Verbs,
};
use crate::time::Millis;

const MAX_FAULT_LENGTH: Millis = 90_000;

impl PlanDraft {
    pub(super) fn draw_action(&mut self, kind: StepKind, at: Millis) -> Option<Action> {
        match kind {
            StepKind::TenantLifecycle
            | StepKind::TenantEdit
            | StepKind::TenantPause
            | StepKind::ForeignFields
            | StepKind::ReleaseDamage => self.draw_tenant_action(kind),
            StepKind::CrdDeletion => Some(self.draw_crd_deletion()),
            StepKind::AnchorDeletion => Some(Action::DeleteAnchor {
                cluster: self.pick_cluster(),
            }),
            StepKind::Kubeconfig => self.draw_kubeconfig_action(at),
            StepKind::Member => self.draw_member_action(),
            StepKind::Deployment => self.draw_deployment_action(),
            StepKind::ChartVersion => {
                self.chart_version += 1;
                let version = self.chart_version;
                Some(Action::ChartVersion { version })
            }
            StepKind::Values => Some(Action::Values {
                number: self.next_edit_number(),
            }),
            StepKind::Crash
            | StepKind::Stop
            | StepKind::AtRequest
            | StepKind::Freeze
            | StepKind::Suspend
            | StepKind::Skew => self.draw_host_fault(kind, at),
            StepKind::LinkCut | StepKind::SlowLink => self.draw_link_fault(kind, at),
            StepKind::HalfOpen => self.draw_half_open(),
            // An agent renews after five days, and the hub after sixty. Their certificates last seven and ninety.
            StepKind::PassDays => Some(Action::PassDays {
                days: self.pick(&[1, 5, 6, 6, 8, 61, 91]),
            }),
            StepKind::Certificates => self.draw_certificate_action(),
            StepKind::AgentCopy => Some(Action::CopyAgent {
                length: self.draw_length(at)?,
                edge: self.pick_edge(|edge| edge.agent_host().is_some())?,
            }),
            StepKind::Twin => self.draw_twin_action(at),
            StepKind::Outage
            | StepKind::BadResponses
            | StepKind::FailingJobs
            | StepKind::Watches
            | StepKind::Restore
            | StepKind::ServerClock => self.draw_server_fault(kind, at),
        }
    }

    fn draw_tenant_action(&mut self, kind: StepKind) -> Option<Action> {
        let tenants = self.settings.tenants.clone();
        let tenant = self.pick(&tenants);
        let exists = self
            .existing
            .get(&tenant_key(&tenant.cluster, &tenant.name))
            .copied();
        let number = self.next_edit_number();
        let placed_on = tenant.placed_on.clone();
        let action = match kind {
            _ if exists != Some(true) => match kind {
                StepKind::TenantLifecycle => TenantAction::Create { placed_on },
                _ => return None,
            },
            StepKind::TenantLifecycle => self.pick(&[
                TenantAction::Delete,
                TenantAction::Delete,
                TenantAction::Delete,
                TenantAction::Orphan,
            ]),
            StepKind::TenantEdit => self.pick(&[
                TenantAction::Edit { number },
                TenantAction::Edit { number },
                TenantAction::Relabel { number },
                TenantAction::Retry { number },
            ]),
            StepKind::TenantPause => self.pick(&[TenantAction::Pause, TenantAction::Resume]),
            StepKind::ForeignFields => {
                self.pick(&[TenantAction::AddForeign, TenantAction::RemoveForeign])
            }
            _ => self.pick(&[
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
        let exists_after = match action {
            TenantAction::Create { .. } => true,
            TenantAction::Delete | TenantAction::Orphan => false,
            _ => exists?,
        };
        self.existing
            .insert(tenant_key(&tenant.cluster, &tenant.name), exists_after);
        Some(Action::Tenant {
            cluster: tenant.cluster,
            tenant: tenant.name,
            action,
        })
    }

    fn draw_kubeconfig_action(&mut self, at: Millis) -> Option<Action> {
        let length = self.draw_length(at)?;
        let member = self.pick_edge(|edge| edge.access == Access::Kubeconfig)?;
        let action = self.pick(&[
            MemberAction::DamageKubeconfig { length },
            MemberAction::DeleteKubeconfig { length },
            MemberAction::RelabelKubeconfig { length },
        ]);
        Some(Action::Member { member, action })
    }

    fn draw_member_action(&mut self) -> Option<Action> {
        let edges = self.settings.edges.clone();
        let edge = self.pick(&edges);
        let action = self.pick(&[
            MemberAction::Pause,
            MemberAction::Resume,
            MemberAction::Ban,
            MemberAction::Unban,
            MemberAction::Delete { uninstall: false },
            MemberAction::Delete { uninstall: true },
        ]);
        // An agent whose EdgeCluster was deleted needs another invitation.
        if edge.agent_host().is_some() && matches!(action, MemberAction::Delete { .. }) {
            return None;
        }
        Some(Action::Member {
            member: edge.name,
            action,
        })
    }

    fn draw_deployment_action(&mut self) -> Option<Action> {
        let name = self.pick(&["d0".to_owned(), "d1".to_owned()]);
        // Whether a KryptonDeployment names the Secret of a member with both depends on which came first.
        let region = self.pick_edge(|edge| edge.access != Access::Both)?;
        let number = self.next_edit_number();
        let action = if self.deployment_regions.contains_key(&name) {
            self.pick(&[
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
        match action {
            DeploymentAction::Delete => self.deployment_regions.remove(&name),
            _ => self.deployment_regions.insert(name.clone(), region),
        };
        Some(Action::Deployment { name, action })
    }

    fn draw_host_fault(&mut self, kind: StepKind, at: Millis) -> Option<Action> {
        let hosts = self.settings.hosts();
        let host = self.pick(&hosts);
        let length = self.draw_length(at)?;
        Some(match kind {
            StepKind::Crash => Action::Crash {
                host,
                restart: length,
            },
            StepKind::AtRequest => {
                let limit = [3, 30, 300];
                let limit = self.pick(&limit);
                let crash = RequestFault::Crash {
                    restart: length.min(10_000),
                };
                Action::AtRequest {
                    host,
                    nth: self.rng.random_range(1..=limit),
                    fault: self.pick(&[
                        crash,
                        crash,
                        RequestFault::Fail,
                        RequestFault::LoseResponse,
                    ]),
                }
            }
            StepKind::Stop => Action::Stop { host, length },
            StepKind::Freeze => Action::Freeze { host, length },
            StepKind::Suspend => Action::Suspend { host, length },
            _ => Action::Skew {
                host,
                by: self.rng.random_range(-7_200_000..=7_200_000),
            },
        })
    }

    fn draw_link_fault(&mut self, kind: StepKind, at: Millis) -> Option<Action> {
        let length = self.draw_length(at)?;
        let (from, to) = self.pick_link();
        let (from, to) = match self.rng.random_bool(0.5) {
            true => (from, to),
            false => (to, from),
        };
        let delay = self.rng.random_range(20..=4_000);
        let loss = self.rng.random_range(10..=500);
        let fault = match kind {
            StepKind::LinkCut => self.pick(&[LinkFault::Cut, LinkFault::Cut, LinkFault::Refuse]),
            _ => self.pick(&[LinkFault::Delay(delay), LinkFault::Loss(loss)]),
        };
        Some(Action::Link {
            from,
            to,
            bidirectional: self.rng.random_bool(0.6),
            fault,
            length,
        })
    }

    fn draw_certificate_action(&mut self) -> Option<Action> {
        if self.members_are_kept && self.rng.random_bool(0.3) {
            return Some(Action::RotateCa);
        }
        let member = self.pick_edge(|edge| edge.agent_host().is_some())?;
        Some(Action::Member {
            member,
            action: MemberAction::Rejoin,
        })
    }

    fn draw_twin_action(&mut self, at: Millis) -> Option<Action> {
        let length = self.draw_length(at)?;
        let edges = self.settings.edges.clone();
        let edge = self.pick(&edges);
        let source_may_change = edge.access == Access::Kubeconfig && self.kubeconfigs_change;
        // After its member has gone, the twin rightly acts.
        let action = self.pick(&[
            MemberAction::AddTwin { length },
            MemberAction::AddElsewhere { length },
        ]);
        (self.members_are_kept && !source_may_change).then_some(Action::Member {
            member: edge.name,
            action,
        })
    }

    /// Only the connection between an agent and a hub. Watches of API servers notice the fault after 290 s.
    fn draw_half_open(&mut self) -> Option<Action> {
        let edge = self.pick_edge(|edge| edge.agent_host().is_some())?;
        let hub = format!("hub-{}", self.rng.random_range(0..self.settings.hubs));
        let agent = format!("agent-{edge}");
        let (from, to) = match self.rng.random_bool(0.5) {
            true => (agent, hub),
            false => (hub, agent),
        };
        Some(Action::HalfOpen { from, to })
    }

    fn draw_server_fault(&mut self, kind: StepKind, at: Millis) -> Option<Action> {
        let cluster = self.pick_cluster();
        let length = self.draw_length(at)?;
        Some(match kind {
            StepKind::Outage | StepKind::BadResponses | StepKind::FailingJobs => {
                let faults: &[ServerFault] = match kind {
                    StepKind::Outage => &[ServerFault::Down, ServerFault::Hangs],
                    StepKind::FailingJobs => &[ServerFault::FailingJobs],
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
                let fault = self.pick(faults);
                Action::Server {
                    cluster,
                    fault,
                    scope: self.draw_scope(kind, fault),
                    length,
                }
            }
            StepKind::Watches => match self.rng.random_bool(0.5) {
                true => Action::EndWatches { cluster },
                false => Action::Compact { cluster },
            },
            StepKind::Restore => Action::Restore {
                cluster,
                after: length.min(20_000),
            },
            _ => Action::ServerClock {
                cluster,
                by: self.rng.random_range(-120_000..=120_000),
                length,
            },
        })
    }

    fn draw_scope(&mut self, kind: StepKind, fault: ServerFault) -> Scope {
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
        let one_resource = vec![self.pick(resources).to_owned()];
        let is_limited = fault == ServerFault::EmptyLists || self.rng.random_bool(0.5);
        match kind {
            StepKind::BadResponses => Scope {
                verbs: self.pick(&[Verbs::All, Verbs::Gets, Verbs::Lists]),
                resources: if is_limited { one_resource } else { Vec::new() },
            },
            _ => Scope::default(),
        }
    }

    /// A length that ends before the chaos does.
    fn draw_length(&mut self, at: Millis) -> Option<Millis> {
        let max_length = self
            .settings
            .chaos
            .checked_sub(at + MIN_PAUSE)?
            .min(MAX_FAULT_LENGTH);
        // Short and long faults are equally frequent.
        let limit = self
            .pick(&[2_000, 10_000, 40_000, MAX_FAULT_LENGTH])
            .min(max_length);
        (limit > 200).then(|| self.rng.random_range(100..=limit))
    }

    /// Deletes the CRD of Tenants on a cluster, or at home another one. Agents would have to join again without that of
    /// EdgeClusters.
    fn draw_crd_deletion(&mut self) -> Action {
        let cluster = self.pick_cluster();
        if cluster != HOME || self.rng.random_bool(0.5) {
            return Action::DeleteCrd { cluster };
        }
        let mut edges = self.settings.edges.iter();
        let has_agents = edges.any(|edge| edge.agent_host().is_some());
        let resource = match !has_agents && self.rng.random_bool(0.5) {
            true => "edgeclusters".to_owned(),
            false => "kryptondeployments".to_owned(),
        };
        Action::DeleteHomeCrd { resource }
    }

    fn pick_cluster(&mut self) -> String {
        let clusters = self.settings.clusters();
        self.pick(&clusters)
    }

    /// A host and a cluster or hub that it talks to.
    fn pick_link(&mut self) -> (String, String) {
        let hub = format!("hub-{}", self.rng.random_range(0..self.settings.hubs));
        let edges = self.settings.edges.clone();
        let edge = self.pick(&edges);
        match (edge.agent_host(), self.rng.random_range(0..3)) {
            (_, 0) => (hub, HOME.to_owned()),
            (Some(agent), 1) => (agent, hub),
            (Some(agent), _) => (agent, edge.name),
            (None, _) => (hub, edge.name),
        }
    }

    fn pick_edge(&mut self, condition: fn(&Edge) -> bool) -> Option<String> {
        let edges = self.settings.edges.iter();
        let edges: Vec<String> = edges
            .filter(|edge| condition(edge))
            .map(|edge| edge.name.clone())
            .collect();
        (!edges.is_empty()).then(|| self.pick(&edges))
    }

    fn next_edit_number(&mut self) -> u32 {
        self.last_edit += 1;
        self.last_edit
    }
}
