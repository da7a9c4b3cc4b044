//! Carries out the actions of a plan in a simulation, and reports each as [`Seen::Fault`] in the text form of the plan.
//!
//! The stage passes `--tenant-values` and `--chart-values-from` with [`VALUES`] to the hub, reads [`chart_version`] at each
//! start of a hub, and creates the namespace [`crate::plan::TENANTS`] on each cluster. It creates the first Tenants with
//! [`apply`] from [`crate::plan::Settings::creations`], because the oracles follow the wishes of [`PEOPLE`]. Secrets with
//! kubeconfigs are in the hub's namespace, have the edge cluster's name, and the labels of
//! [`krypton_types::names::DISCOVERY_LABEL`] and [`krypton_types::names::OPEN_TO_DEPLOYMENTS_LABEL`].

mod answers;
mod people;
mod restore;

use jiff::SignedDuration;
use krypton_sim_apiserver::server::Snapshot;

use crate::conductor::{Health, Millis, Simulation};
use crate::network::Link;
use crate::observe::Event as Seen;
use crate::plan::{Action, FOREVER, LinkFault, Plan, Scope, ServerFault, Strike, Verbs};
use crate::stage::{self, Fleet};

pub use people::{FOREIGN, PEOPLE, Person, VALUES};
pub use restore::{REBUILD, RESTORE};

/// Start of the text of an observation that reports the end of a fault.
pub const END: &str = "end of ";
/// Longest fault that is not permanent.
const LONGEST: Millis = 24 * 60 * 60 * 1000;
/// Time between the restarts of two hubs in a rollout.
const ROLLOUT: Millis = 10_000;
/// Time that the restart of a hub takes.
const RESTART: Millis = 500;
/// Number of attempts of people to let an agent join again, and the time between two.
const INVITATIONS: u64 = 4;
const INVITES: Millis = 20_000;
/// File in the simulation's folder with the chart's version.
const VERSION_FILE: &str = "chart-version";

/// Carries out an action. The end of a fault is scheduled with [`Simulation::at`].
pub fn apply(simulation: &mut Simulation, action: &Action) {
    let text = action.to_string();
    simulation.observe(Seen::Fault { text });
    match action {
        Action::Crash { host, restart } => crash(simulation, host, *restart),
        Action::AtRequest { host, nth, strike } => {
            // The oracles learn of the fault when it happens.
            let text = match strike {
                Strike::Crash { restart } => {
                    let (host, restart) = (host.clone(), *restart);
                    Action::Crash { host, restart }.to_string()
                }
                Strike::Fail | Strike::LoseAnswer => format!("{END}{action}"),
            };
            simulation.strike_at_request(host, *nth, *strike, text);
        }
        Action::Stop { host, length } => {
            simulation.stop(host, (*length != FOREVER).then_some(*length));
        }
        Action::Freeze { host, length } => simulation.freeze(host, (*length).min(LONGEST)),
        Action::Suspend { host, length } => simulation.suspend(host, (*length).min(LONGEST)),
        Action::CopyAgent { edge, .. } => {
            let copy = stage::copy_agent(simulation, edge);
            end_later(simulation, action, move |simulation| {
                simulation.crash(&copy, None)
            });
        }
        Action::Skew { host, by } => simulation.skew(host, SignedDuration::from_millis(*by)),
        Action::PassDays { days } => {
            simulation.pass(SignedDuration::from_hours(24 * i64::from(*days)))
        }
        Action::Link {
            from,
            to,
            both,
            fault,
            ..
        } => {
            let state = link_state(*fault);
            set_link(simulation, (from, to), *both, state);
            let (from, to, both) = (from.clone(), to.clone(), *both);
            let end = move |simulation: &mut Simulation| {
                set_link(simulation, (&from, &to), both, Link::default());
            };
            end_later(simulation, action, end);
        }
        Action::HalfOpen { from, to } => simulation.half_open(from, to),
        Action::Server { .. }
        | Action::EndWatches { .. }
        | Action::Compact { .. }
        | Action::Restore { .. }
        | Action::ServerClock { .. } => server(simulation, action),
        Action::ChartVersion { version } => roll_out(simulation, *version),
        Action::Tenant { .. }
        | Action::Member { .. }
        | Action::Deployment { .. }
        | Action::Values { .. }
        | Action::RotateCa
        | Action::DeleteCrd { .. }
        | Action::DeleteHomeCrd { .. }
        | Action::DeleteAnchor { .. } => people::act(simulation, action),
    }
}

/// Schedules all steps of a plan, relative to `start`.
pub fn schedule(simulation: &mut Simulation, plan: &Plan, start: Millis) {
    for step in &plan.steps {
        let action = step.action.clone();
        simulation.at(start.saturating_add(step.at), move |simulation| {
            apply(simulation, &action);
        });
    }
}

/// Ends all faults that are not permanent. Programs that have crashed start again.
pub fn heal(simulation: &mut Simulation, plan: &Plan) {
    simulation.cancel_strikes();
    let permanent: Vec<&Action> = plan
        .steps
        .iter()
        .map(|step| &step.action)
        .filter(|action| action.length() == Some(FOREVER))
        .collect();
    let remains = |name: &str| {
        permanent
            .iter()
            .any(|action| action.needs().contains(&name))
    };
    if !permanent
        .iter()
        .any(|action| matches!(action, Action::Link { .. }))
    {
        simulation.heal_links();
    }
    for cluster in plan.settings.clusters() {
        if !remains(&cluster) {
            set_fault(simulation, &cluster, None);
        }
    }
    for host in plan.settings.hosts() {
        if !remains(&host) {
            simulation.start(&host);
        }
    }
    let settings = &plan.settings;
    for edge in &settings.edges {
        if let Some(agent) = edge.agent().filter(|_| !remains(&edge.name))
            && !remains(&agent)
        {
            invite(simulation, edge.name.clone());
        }
    }
    people::delete_forged(simulation, &settings.clusters());
    give_up_unreadable(simulation, settings.clusters());
    // A restore of home may have brought back what people had changed only for a time.
    Fleet { settings }.provide_kubeconfigs(simulation);
    simulation.observe(Seen::Fault {
        text: "heal".to_owned(),
    });
}

/// Replaces the whole store of a cluster.
pub(crate) fn rebuild(simulation: &mut Simulation, cluster: &str, empty: Snapshot) {
    restore::restore(simulation, cluster, empty, REBUILD);
}

/// Lets people give up releases that cannot be decoded, as soon as their deletion waits.
fn give_up_unreadable(simulation: &mut Simulation, clusters: Vec<String>) {
    for attempt in 0..INVITATIONS {
        let clusters = clusters.clone();
        let at = simulation.now() + attempt * INVITES;
        simulation.at(at, move |simulation| {
            people::give_up_unreadable(simulation, &clusters);
        });
    }
}

/// Gives new bundles to an agent whose certificate has expired. An agent uses a bundle only once after its start.
fn invite(simulation: &mut Simulation, edge: String) {
    for attempt in 0..INVITATIONS {
        let edge = edge.clone();
        let at = simulation.now() + attempt * INVITES;
        simulation.at(at, move |simulation| {
            if stage::is_expired(simulation, &edge) {
                people::rejoin(simulation, &edge);
            }
        });
    }
}

/// The chart's version `0.N.0` in the flags of a hub that starts now, as N.
pub fn chart_version(simulation: &Simulation) -> u32 {
    chart_version_in(simulation.folder())
}

/// Like [`chart_version`], for a program that knows only the simulation's folder.
pub fn chart_version_in(folder: &std::path::Path) -> u32 {
    let text = std::fs::read_to_string(folder.join(VERSION_FILE));
    let version = text.ok().and_then(|text| text.trim().parse().ok());
    version.unwrap_or(1)
}

fn crash(simulation: &mut Simulation, host: &str, restart: Millis) {
    simulation.crash(host, (restart != FOREVER).then_some(restart));
}

/// Restarts the hubs with the new version, one after the other.
fn roll_out(simulation: &mut Simulation, version: u32) {
    let file = simulation.folder().join(VERSION_FILE);
    if let Err(error) = std::fs::write(&file, version.to_string()) {
        let text = format!("writing {} failed: {error}", file.display());
        simulation.observe(Seen::Fault { text });
        return;
    }
    let now = simulation.now();
    for number in 0..3 {
        simulation.at(now + number * ROLLOUT, move |simulation| {
            let hub = format!("hub-{number}");
            if simulation.runs(&hub) {
                simulation.crash(&hub, Some(RESTART));
            }
        });
    }
}

/// Schedules the end of a fault, unless it is permanent.
fn end_later(
    simulation: &mut Simulation,
    action: &Action,
    end: impl FnOnce(&mut Simulation) + 'static,
) {
    let Some(length) = action.length().filter(|length| *length != FOREVER) else {
        return;
    };
    let text = format!("{END}{action}");
    let at = simulation.now() + length.min(LONGEST);
    simulation.at(at, move |simulation| {
        end(simulation);
        simulation.observe(Seen::Fault { text });
    });
}

fn link_state(fault: LinkFault) -> Link {
    match fault {
        LinkFault::Cut => Link {
            cut: true,
            ..Link::default()
        },
        LinkFault::Refuse => Link {
            refused: true,
            ..Link::default()
        },
        LinkFault::Delay(delay) => Link {
            delay,
            ..Link::default()
        },
        LinkFault::Loss(loss) => Link {
            loss,
            ..Link::default()
        },
    }
}

fn set_link(simulation: &mut Simulation, (from, to): (&str, &str), both: bool, state: Link) {
    simulation.link(from, to, state);
    if both {
        simulation.link(to, from, state);
    }
}

fn server(simulation: &mut Simulation, action: &Action) {
    match action {
        Action::Server {
            cluster,
            fault,
            scope,
            ..
        } => {
            set_fault(simulation, cluster, Some((*fault, scope)));
            let cluster = cluster.clone();
            end_later(simulation, action, move |simulation| {
                set_fault(simulation, &cluster, None);
            });
            end_watches(simulation, action);
        }
        Action::EndWatches { cluster } => {
            simulation.change_cluster(cluster, |cluster, _| cluster.server.end_watches());
        }
        Action::Compact { cluster } => {
            simulation.change_cluster(cluster, |cluster, _| cluster.server.compact());
        }
        Action::Restore { cluster, .. } => {
            let Some(snapshot) =
                simulation.change_cluster(cluster, |cluster, _| cluster.server.snapshot())
            else {
                return;
            };
            let cluster = cluster.clone();
            end_later(simulation, action, move |simulation| {
                restore::restore(simulation, &cluster, snapshot, RESTORE);
            });
        }
        Action::ServerClock { cluster, by, .. } => {
            let by = SignedDuration::from_millis(*by);
            simulation.change_cluster(cluster, |cluster, _| cluster.skew += by);
            let cluster = cluster.clone();
            end_later(simulation, action, move |simulation| {
                simulation.change_cluster(&cluster, |cluster, _| cluster.skew -= by);
            });
        }
        _ => {}
    }
}

fn set_fault(simulation: &mut Simulation, cluster: &str, fault: Option<(ServerFault, &Scope)>) {
    let health = fault.map_or(Health::Up, |(fault, _)| answers::health(fault));
    let scope = fault.map(|(_, scope)| scope.clone()).unwrap_or_default();
    simulation.change_cluster(cluster, |cluster, _| {
        cluster.health = health;
        cluster.scope = scope;
        let fail = matches!(fault, Some((ServerFault::FailingJobs, _)));
        cluster.server.fail_jobs(fail);
    });
}

/// The watches of a server that goes down end, too. Clients list again only after the end of a watch.
fn end_watches(simulation: &mut Simulation, action: &Action) {
    let Action::Server {
        cluster,
        fault,
        scope,
        ..
    } = action
    else {
        return;
    };
    let lists = scope.verbs == Verbs::Lists || !scope.resources.is_empty();
    if lists || matches!(fault, ServerFault::Down | ServerFault::EmptyLists) {
        simulation.change_cluster(cluster, |cluster, _| cluster.server.end_watches());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_fault_becomes_one_state() {
        assert!(link_state(LinkFault::Cut).cut);
        assert!(link_state(LinkFault::Refuse).refused);
        assert_eq!(link_state(LinkFault::Delay(70)).delay, 70);
        assert_eq!(link_state(LinkFault::Loss(5)).loss, 5);
    }

    #[test]
    fn chart_version_defaults_to_one() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(chart_version_in(folder.path()), 1);
        std::fs::write(folder.path().join(VERSION_FILE), "7\n").unwrap();
        assert_eq!(chart_version_in(folder.path()), 7);
    }
}
