//! Carries out the actions of a plan in a simulation, and reports each as [`Event::Fault`] in the text form of the
//! plan.
//!
//! The stage passes `--tenant-values` and `--chart-values-from` with [`crate::plan::VALUES_CONFIG_MAP`] to the hub,
//! reads [`chart::version_in`] at each start of a hub, and creates the namespace [`crate::plan::TENANT_NAMESPACE`] on
//! each cluster. Secrets with kubeconfigs are in the hub's namespace, have the edge cluster's name, and the labels of
//! [`krypton_types::names::DISCOVERY_LABEL`] and [`krypton_types::names::OPEN_TO_DEPLOYMENTS_LABEL`].

mod answers;
mod people;
mod restore;

use std::collections::BTreeSet;

use jiff::SignedDuration;

use crate::chart;
use crate::conductor::{Health, Simulation};
use crate::hostile;
use crate::network::Link;
use crate::observe::{END_PREFIX, Event};
use crate::plan::{
    Action, FOREVER, LinkFault, Plan, RequestFault, Scope, ServerFault, Settings, TenantAction,
    Verbs,
};
use crate::stage::{self, Fleet};
use crate::time::Millis;

pub use people::FOREIGN_PREFIX;
pub use restore::{REBUILD_WRITER, RESTORE_WRITER};

/// Longest fault that is not permanent.
const MAX_LENGTH: Millis = 24 * 60 * 60 * 1000;
/// Time between the restarts of two hubs in a rollout.
const ROLLOUT_INTERVAL: Millis = 10_000;
/// Time that the restart of a program takes.
const RESTART_TIME: Millis = 500;
/// Number of attempts of people to repair the fleet after the chaos, and the time between two.
const ATTEMPTS: u64 = 4;
const ATTEMPT_INTERVAL: Millis = 20_000;

/// Carries out an action. The end of a fault is scheduled with [`Simulation::schedule`].
pub fn apply(simulation: &mut Simulation, action: &Action) {
    let text = action.to_string();
    simulation.record(Event::Fault { text });
    match action {
        Action::Crash { host, restart } => crash(simulation, host, *restart),
        Action::AtRequest { host, nth, fault } => {
            // The oracles are notified of the fault when it happens.
            let text = match fault {
                RequestFault::Crash { restart } => {
                    let (host, restart) = (host.clone(), *restart);
                    Action::Crash { host, restart }.to_string()
                }
                RequestFault::Fail | RequestFault::LoseResponse => format!("{END_PREFIX}{action}"),
            };
            simulation.add_request_fault(host, *nth, *fault, text);
        }
        Action::Stop { host, length } => {
            simulation.stop(host, (*length != FOREVER).then_some(*length));
        }
        Action::Freeze { host, length } => simulation.freeze(host, (*length).min(MAX_LENGTH)),
        Action::Suspend { host, length } => simulation.suspend(host, (*length).min(MAX_LENGTH)),
        Action::CopyAgent { edge, .. } => {
            let copy = stage::copy_agent(simulation, edge);
            schedule_end(simulation, action, move |simulation| {
                simulation.crash(&copy, None)
            });
        }
        Action::HostileAgent { edge, .. } => {
            let host = hostile::start(simulation, edge);
            let agent = format!("agent-{edge}");
            schedule_end(simulation, action, move |simulation| {
                simulation.crash(&host, None);
                simulation.start(&agent);
            });
        }
        Action::Skew { host, by } => simulation.skew(host, SignedDuration::from_millis(*by)),
        Action::PassDays { days } => {
            simulation.advance_wall_clocks(SignedDuration::from_hours(24 * i64::from(*days)))
        }
        Action::Link {
            from,
            to,
            bidirectional,
            fault,
            ..
        } => {
            let state = link_state(*fault);
            set_link(simulation, (from, to), *bidirectional, state);
            let (from, to, bidirectional) = (from.clone(), to.clone(), *bidirectional);
            let end = move |simulation: &mut Simulation| {
                set_link(simulation, (&from, &to), bidirectional, Link::default());
            };
            schedule_end(simulation, action, end);
        }
        Action::HalfOpen { from, to } => simulation.half_open(from, to),
        Action::Server { .. }
        | Action::EndWatches { .. }
        | Action::Compact { .. }
        | Action::Restore { .. }
        | Action::ServerClock { .. } => apply_server_action(simulation, action),
        Action::ChartVersion { version } => roll_out(simulation, *version),
        Action::Tenant { .. }
        | Action::Member { .. }
        | Action::Deployment { .. }
        | Action::Values { .. }
        | Action::RotateCa
        | Action::DeleteCrd { .. }
        | Action::DeleteHomeCrd { .. }
        | Action::DeleteAnchor { .. }
        | Action::DeleteEpoch => people::perform(simulation, action),
    }
}

/// Creates the Tenants that exist at the start. It reports each creation, because the oracles record what people want.
pub fn create_tenants(simulation: &mut Simulation, settings: &Settings) {
    for tenant in &settings.tenants {
        let placed_on = tenant.placed_on.clone();
        let creation = Action::Tenant {
            cluster: tenant.cluster.clone(),
            tenant: tenant.name.clone(),
            action: TenantAction::Create { placed_on },
        };
        apply(simulation, &creation);
    }
}

/// Schedules all steps of a plan, relative to `start`.
pub fn schedule_steps(simulation: &mut Simulation, plan: &Plan, start: Millis) {
    for step in &plan.steps {
        let action = step.action.clone();
        simulation.schedule(start.saturating_add(step.at), move |simulation| {
            apply(simulation, &action);
        });
    }
}

/// Ends all faults that are not permanent. Programs that have crashed start again.
pub fn heal(simulation: &mut Simulation, plan: &Plan) {
    simulation.cancel_request_faults();
    let permanent: Vec<&Action> = plan
        .steps
        .iter()
        .map(|step| &step.action)
        .filter(|action| action.length() == Some(FOREVER))
        .collect();
    let has_permanent_fault = |name: &str| {
        permanent
            .iter()
            .any(|action| action.required_names().contains(&name))
    };
    if !permanent
        .iter()
        .any(|action| matches!(action, Action::Link { .. }))
    {
        simulation.heal_links();
    }
    for cluster in plan.settings.clusters() {
        if !has_permanent_fault(&cluster) {
            set_server_fault(simulation, &cluster, None);
        }
    }
    for host in plan.settings.hosts() {
        if !has_permanent_fault(&host) {
            simulation.start(&host);
        }
    }
    let settings = &plan.settings;
    for edge in &settings.edges {
        if let Some(agent) = edge
            .agent_host()
            .filter(|_| !has_permanent_fault(&edge.name))
            && !has_permanent_fault(&agent)
        {
            invite_expired_agent(simulation, edge.name.clone());
        }
    }
    people::delete_forged(simulation, &settings.clusters());
    // A restore may have brought back what people had removed.
    people::remove_foreign(simulation, &settings.clusters());
    let clusters = settings.clusters();
    repair_repeatedly(simulation, move |simulation| {
        people::orphan_unreadable_tenants(simulation, &clusters);
    });
    delete_members_without_source(simulation, plan);
    // A restore of home may have brought back a temporary change by people.
    Fleet { settings }.ensure_kubeconfigs(simulation);
    simulation.record(Event::Fault {
        text: "heal".to_owned(),
    });
}

/// Lets people try a repair now and a few times later, because the damage may show late.
fn repair_repeatedly(
    simulation: &mut Simulation,
    repair: impl Fn(&mut Simulation) + Clone + 'static,
) {
    for attempt in 0..ATTEMPTS {
        let repair = repair.clone();
        let at = simulation.now() + attempt * ATTEMPT_INTERVAL;
        simulation.schedule(at, repair);
    }
}

/// Gives new bundles to an agent whose certificate has expired. An agent uses a bundle only once after its start. The
/// hub rejects a banned agent, and each restart would let it wait for its old Lease again.
fn invite_expired_agent(simulation: &mut Simulation, edge: String) {
    repair_repeatedly(simulation, move |simulation| {
        if stage::is_expired(simulation, &edge) && !stage::is_banned(simulation, &edge) {
            people::rejoin_agent(simulation, &edge);
        }
    });
}

/// Deletes the EdgeClusters that the plan's temporary Secrets have left behind.
fn delete_members_without_source(simulation: &mut Simulation, plan: &Plan) {
    let sources = plan.steps.iter().filter_map(|step| match &step.action {
        Action::Member { member, action } => people::temporary_source(member, action),
        _ => None,
    });
    let sources: BTreeSet<_> = sources.collect();
    for (namespace, name) in sources {
        repair_repeatedly(simulation, move |simulation| {
            people::delete_member_without_source(simulation, (namespace, &name));
        });
    }
}

fn crash(simulation: &mut Simulation, host: &str, restart: Millis) {
    simulation.crash(host, (restart != FOREVER).then_some(restart));
}

/// Restarts the hubs with the new version, one after the other.
fn roll_out(simulation: &mut Simulation, version: u32) {
    if let Err(error) = chart::set_version(simulation.folder(), version) {
        let text = format!("writing the chart's version failed: {error}");
        simulation.record(Event::Fault { text });
        return;
    }
    let now = simulation.now();
    for number in 0..3 {
        simulation.schedule(now + number * ROLLOUT_INTERVAL, move |simulation| {
            let hub = format!("hub-{number}");
            if simulation.is_running(&hub) {
                simulation.crash(&hub, Some(RESTART_TIME));
            }
        });
    }
}

/// Schedules the end of a fault, unless it is permanent.
fn schedule_end(
    simulation: &mut Simulation,
    action: &Action,
    end: impl FnOnce(&mut Simulation) + 'static,
) {
    let Some(length) = action.length().filter(|length| *length != FOREVER) else {
        return;
    };
    let text = format!("{END_PREFIX}{action}");
    let at = simulation.now() + length.min(MAX_LENGTH);
    simulation.schedule(at, move |simulation| {
        end(simulation);
        simulation.record(Event::Fault { text });
    });
}

fn link_state(fault: LinkFault) -> Link {
    let mut link = Link::default();
    match fault {
        LinkFault::Cut => link.cut = true,
        LinkFault::Refuse => link.refused = true,
        LinkFault::Delay(delay) => link.delay = delay,
        LinkFault::Loss(loss) => link.loss = loss,
    }
    link
}

fn set_link(
    simulation: &mut Simulation,
    (from, to): (&str, &str),
    bidirectional: bool,
    state: Link,
) {
    simulation.set_link(from, to, state);
    if bidirectional {
        simulation.set_link(to, from, state);
    }
}

fn apply_server_action(simulation: &mut Simulation, action: &Action) {
    match action {
        Action::Server {
            cluster,
            fault,
            scope,
            ..
        } => {
            set_server_fault(simulation, cluster, Some((*fault, scope)));
            let target = cluster.clone();
            schedule_end(simulation, action, move |simulation| {
                set_server_fault(simulation, &target, None);
            });
            // Clients list again only after the end of a watch.
            let affects_lists = matches!(scope.verbs, Verbs::Lists | Verbs::WideLists)
                || !scope.resources.is_empty();
            if affects_lists || matches!(fault, ServerFault::Down | ServerFault::EmptyLists) {
                simulation.change_cluster(cluster, |cluster, _| cluster.server.end_watches());
            }
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
            schedule_end(simulation, action, move |simulation| {
                restore::restore(simulation, &cluster, snapshot, RESTORE_WRITER);
            });
        }
        Action::ServerClock { cluster, by, .. } => {
            let by = SignedDuration::from_millis(*by);
            simulation.change_cluster(cluster, |cluster, _| cluster.move_clock(by));
            let cluster = cluster.clone();
            schedule_end(simulation, action, move |simulation| {
                simulation.change_cluster(&cluster, |cluster, _| cluster.move_clock(-by));
            });
        }
        _ => {}
    }
}

fn set_server_fault(
    simulation: &mut Simulation,
    cluster: &str,
    fault: Option<(ServerFault, &Scope)>,
) {
    let health = fault.map_or(Health::Up, |(fault, _)| answers::health_during(fault));
    let scope = fault.map(|(_, scope)| scope.clone()).unwrap_or_default();
    simulation.change_cluster(cluster, |cluster, _| {
        cluster.health = health;
        cluster.scope = scope;
        let jobs_fail = matches!(fault, Some((ServerFault::FailingJobs, _)));
        cluster.server.fail_jobs(jobs_fail);
    });
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
}
