//! Invariants of processes that stop, restart, or take over from each other.

use std::collections::{BTreeMap, BTreeSet};

use krypton_types::names::{EPOCH_CONFIG_MAP, HUB_LEASE};

use super::leases::MEMBER_LEASE;
use super::releases::started_run;
use super::view::{agent_cluster, holder, is_disconnected, is_krypton, is_product, object_update};
use super::{AttributedWrite, CheckResult, Oracle, Phase, View, ensure, invariant};
use crate::object::text;
use crate::observe::{Event, HelmEnd, Observation};
use crate::plan::{Access, Action, FOREVER, HOME, TenantAction};
use crate::time::Millis;

/// Time in which a fault that has ended may still have effects.
const AFTERMATH: Millis = 120_000;
/// A hub waits 60 s for a lost agent. It counts from the agent's last report.
const AGENT_GRACE: Millis = 42_000;
/// A stopping leader releases its Lease in this time.
const HANDOVER_TIME: Millis = 5_000;
/// A stopping process lets Helm run this long.
const DRAIN_TIME: Millis = 14_000;
/// Longest outage of home that changes no leader.
const SHORT_OUTAGE: Millis = 20_000;

/// The end of the last action that an invariant does not expect.
#[derive(Debug, Default)]
pub(super) struct UnexpectedAction {
    until: Millis,
}

impl UnexpectedAction {
    /// Returns whether the observation is an action that was not expected.
    pub(super) fn observe(
        &mut self,
        observation: &Observation,
        expected: impl Fn(&Action) -> bool,
    ) -> bool {
        let Some(action) = reported_action(observation).filter(|action| !expected(action)) else {
            return false;
        };
        let length = action.length().unwrap_or_default();
        let end = observation
            .at
            .saturating_add(length)
            .saturating_add(action.detection_delay());
        self.until = self.until.max(end);
        true
    }

    pub(super) fn is_over(&self, now: Millis) -> bool {
        now > self.until.saturating_add(AFTERMATH)
    }
}

/// The action whose start or end the observation reports.
fn reported_action(observation: &Observation) -> Option<Action> {
    observation.event.action().map(|(action, _)| action)
}

/// Whether the action changes only the content that Krypton installs.
pub(super) fn changes_content(action: &Action) -> bool {
    matches!(
        action,
        Action::Tenant { .. } | Action::Deployment { .. } | Action::Values { .. }
    )
}

fn changes_content_or_stops(action: &Action) -> bool {
    changes_content(action) || matches!(action, Action::Stop { .. })
}

invariant! {
    /// A process that gets SIGTERM ends in time, and no Lease names it afterwards.
    StoppedProcessEnds {
        unexpected: UnexpectedAction,
    },
    "stopped-process-ends",
    fn check_observation(&mut self, view: &View, observation: &Observation) -> CheckResult {
        self.unexpected
            .observe(observation, changes_content_or_stops);
        let Event::ProcessStopped { host, in_time } = &observation.event else {
            return Ok(());
        };
        if !self.unexpected.is_over(observation.at) {
            return Ok(());
        }
        ensure(*in_time, || format!("{host} does not end"))?;
        for cluster in view.settings.clusters() {
            for lease in [HUB_LEASE, MEMBER_LEASE] {
                let is_held = view.renewal(&cluster, lease).is_some_and(|renewal| {
                    renewal.host.as_ref() == Some(host) && !renewal.holder.is_empty()
                });
                ensure(!is_held, || {
                    format!("{host} has ended, and holds {lease} on {cluster}")
                })?;
            }
        }
        Ok(())
    }
}

invariant! {
    /// A leader that gets SIGTERM lets another hub lead while it waits for Helm.
    StoppingLeaderHandsOver {
        unexpected: UnexpectedAction,
        /// Times of the last SIGTERM, by host.
        sigterms: BTreeMap<String, Millis>,
    },
    "stopping-leader-hands-over",
    fn check_observation(&mut self, view: &View, observation: &Observation) -> CheckResult {
        self.unexpected
            .observe(observation, changes_content_or_stops);
        match &observation.event {
            Event::ProcessStarted { host } => drop(self.sigterms.remove(host)),
            Event::Fault { .. } => {
                if let Some(Action::Stop { host, .. }) = reported_action(observation) {
                    self.sigterms.insert(host, observation.at);
                }
            }
            _ => {}
        }
        if self.sigterms.is_empty() {
            return Ok(());
        }
        let Some(renewal) = view.renewal(HOME, HUB_LEASE) else {
            return Ok(());
        };
        let sigterm = renewal
            .host
            .as_ref()
            .and_then(|host| self.sigterms.get(host));
        let is_late = sigterm.is_some_and(|at| observation.at > at + HANDOVER_TIME);
        ensure(
            renewal.holder.is_empty() || !is_late || !self.unexpected.is_over(observation.at),
            || format!("{} got SIGTERM, and still leads", renewal.holder),
        )
    }
}

invariant! {
    /// A hub acts on a member with an agent only after the agent was away for some time, and not after its return.
    AgentPrecedesProxy {
        unexpected: UnexpectedAction,
        /// When each agent last used its API server.
        last_activity: BTreeMap<String, Millis>,
        /// Members whose agent never returns.
        lost_agents: BTreeSet<String>,
    },
    "agent-precedes-proxy",
    fn check_observation(&mut self, _: &View, observation: &Observation) -> CheckResult {
        self.unexpected.observe(observation, |action| {
            changes_content(action)
                || restarted_host(action).is_some_and(|(host, _)| agent_cluster(host).is_some())
        });
        if let Event::Responded { host, cluster, .. } = &observation.event
            && agent_cluster(host).is_some()
        {
            self.last_activity.insert(cluster.clone(), observation.at);
        }
        if let Some(action) = reported_action(observation)
            && let Some((host, FOREVER)) = restarted_host(&action)
        {
            self.lost_agents
                .extend(agent_cluster(host).map(str::to_owned));
        }
        Ok(())
    }

    fn check_write(&mut self, view: &View, write: &AttributedWrite<'_>) -> CheckResult {
        let (key, after) = (&write.change.key, write.change.after.as_deref());
        let hub_takes_over = key.resource == "leases"
            && key.name == MEMBER_LEASE
            && after.is_some_and(|after| holder(after).starts_with("hub/"))
            && write
                .change
                .before
                .as_deref()
                .is_none_or(|before| !holder(before).starts_with("hub/"));
        if !hub_takes_over || view.phase < Phase::Chaos || !self.unexpected.is_over(view.now) {
            return Ok(());
        }
        let last_activity = self.last_activity.get(write.cluster);
        ensure(
            last_activity.is_none_or(|at| view.now - at >= AGENT_GRACE),
            || {
                format!(
                    "{} takes {} from an agent that has just acted",
                    write.host, write.cluster
                )
            },
        )
    }

    fn check_converged(&mut self, view: &View) -> CheckResult {
        for edge in &view.settings.edges {
            if edge.access != Access::Both || !view.must_converge(&edge.name) {
                continue;
            }
            let holder_prefix = match self.lost_agents.contains(&edge.name) {
                true => "hub/",
                false => "agent/",
            };
            let renewal = view.renewal(&edge.name, MEMBER_LEASE);
            let is_expected_holder =
                renewal.is_some_and(|renewal| renewal.holder.starts_with(holder_prefix));
            ensure(is_expected_holder, || {
                format!("not {holder_prefix} but {renewal:?} acts on {}", edge.name)
            })?;
        }
        Ok(())
    }
}

/// The host whose program ends and starts again, and the time that it is away.
fn restarted_host(action: &Action) -> Option<(&str, Millis)> {
    match action {
        Action::Crash {
            host,
            restart: length,
        }
        | Action::Stop { host, length } => Some((host, *length)),
        _ => None,
    }
}

invariant! {
    /// Faults of the home cluster and of other hosts interrupt no Helm run.
    HelmRunsToItsEnd {
        /// The last cause for a process to end its Helm runs, by its host.
        unexpected: BTreeMap<String, UnexpectedAction>,
        /// Times of the last SIGTERM, by host.
        sigterms: BTreeMap<String, Millis>,
    },
    "helm-runs-to-its-end",
    fn check_observation(&mut self, view: &View, observation: &Observation) -> CheckResult {
        let is_fault = matches!(observation.event, Event::Fault { .. });
        if is_fault || self.unexpected.is_empty() {
            for host in view.settings.hosts() {
                let unexpected = self.unexpected.entry(host.clone()).or_default();
                unexpected.observe(observation, |action| leaves_helm_running(action, &host));
            }
        }
        if let Some(Action::Stop { host, .. }) = reported_action(observation) {
            self.sigterms.insert(host, observation.at);
        }
        let Event::HelmEnded { host, end, .. } = &observation.event else {
            return Ok(());
        };
        let was_interrupted = match end {
            HelmEnd::Killed => true,
            HelmEnd::Exited { code, stderr } => *code != 0 && stderr.contains("context canceled"),
        };
        let is_calm = self
            .unexpected
            .get(host)
            .is_some_and(|unexpected| unexpected.is_over(observation.at));
        let mut sigterms = self.sigterms.get(host).into_iter();
        let was_drained = sigterms
            .any(|at| observation.at - at >= DRAIN_TIME && observation.at - at <= AFTERMATH);
        ensure(!was_interrupted || !is_calm || was_drained, || {
            format!("{host} ends its Helm without a cause: {end:?}")
        })
    }
}

/// Whether the action gives this host no reason to end Helm.
fn leaves_helm_running(action: &Action, host: &str) -> bool {
    match action {
        Action::Server { cluster, .. }
        | Action::EndWatches { cluster }
        | Action::Compact { cluster } => cluster == HOME,
        Action::Link { from, to, .. } | Action::HalfOpen { from, to } => {
            let ends = [from, to];
            !ends.iter().any(|end| *end == host) || !ends.iter().any(|end| end.starts_with("edge-"))
        }
        Action::Crash { host: other, .. } | Action::Freeze { host: other, .. } => other != host,
        Action::Tenant { action, .. } => matches!(
            action,
            TenantAction::Create { .. } | TenantAction::Edit { .. }
        ),
        Action::Stop { .. } | Action::Values { .. } | Action::RotateCa => true,
        _ => false,
    }
}

invariant! {
    /// A short outage of home changes neither the leader nor the connections of members.
    OutageChangesNoLeader {
        unexpected: UnexpectedAction,
    },
    "outage-changes-no-leader",
    fn check_observation(&mut self, view: &View, observation: &Observation) -> CheckResult {
        self.unexpected.observe(observation, |action| {
            changes_content(action) || is_short_outage(action)
        });
        let is_calm = self.unexpected.is_over(observation.at)
            && view.phase >= Phase::Chaos
            && view.separated_member.is_none();
        let Some((HOME, change, before, after)) = object_update(observation).filter(|_| is_calm)
        else {
            return Ok(());
        };
        let key = &change.key;
        let takes_epoch = key.name == EPOCH_CONFIG_MAP && is_krypton(&change.by);
        ensure(!takes_epoch, || "a hub takes a new epoch".to_owned())?;
        let is_member = key.resource == "edgeclusters";
        ensure(!is_member || !is_disconnected(before, after), || {
            format!("{} is no longer connected", key.name)
        })
    }
}

fn is_short_outage(action: &Action) -> bool {
    let is_short = action.length().is_some_and(|length| length <= SHORT_OUTAGE);
    matches!(action, Action::Server { cluster, .. } if cluster == HOME) && is_short
}

invariant! {
    /// Processes that restart in an idle fleet neither run Helm nor write Tenants, releases or events of Tenants.
    RestartChangesNothing {
        unexpected: UnexpectedAction,
        /// Whether only restarts have happened since the fleet was idle.
        is_idle: bool,
    },
    "restart-changes-nothing",
    fn check_observation(&mut self, view: &View, observation: &Observation) -> CheckResult {
        let is_restart = |action: &Action| restarted_host(action).is_some();
        if reported_action(observation).is_some_and(|action| is_restart(&action)) {
            self.is_idle |= self.unexpected.is_over(observation.at);
        }
        if self
            .unexpected
            .observe(observation, |action| self.is_idle && is_restart(action))
        {
            self.is_idle = false;
        }
        if !self.is_idle
            || view.upgrades_fail()
            || view.separated_member.is_some()
            || view.any_workload_missing()
        {
            return Ok(());
        }
        if let Some(run) = started_run(view, observation) {
            return Err(format!(
                "{} runs helm {} for {}",
                run.host, run.verb, run.release
            ));
        }
        let Event::Change { cluster, change } = &observation.event else {
            return Ok(());
        };
        let is_tenant_event = change.key.resource == "events"
            && change
                .after
                .as_deref()
                .is_some_and(|event| text(event, "/involvedObject/kind") == "Tenant");
        let must_stay = change.key.resource == "tenants" || is_tenant_event;
        ensure(!must_stay || !is_product(&change.by), || {
            format!("{} writes {} on {cluster}", change.by, change.key.name)
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::story::{
        AGENT, History, RELEASE, config_map, edge_cluster, epoch, lease, tenant,
    };
    use super::*;

    /// A fleet without faults for some time.
    fn calm() -> History {
        let mut history = History::new();
        history
            .wait(AFTERMATH + 1)
            .enter_phase(Phase::Chaos)
            .renew_leases();
        history
    }

    fn stopped(in_time: bool) -> Event {
        let host = AGENT.to_owned();
        Event::ProcessStopped { host, in_time }
    }

    #[test]
    fn stop_without_end_or_release_is_found() {
        for (holder, in_time, oracle) in [
            ("", true, None),
            ("", false, Some("stopped-process-ends")),
            ("agent/a/1", true, Some("stopped-process-ends")),
        ] {
            let mut history = calm();
            history
                .fault("stop agent-edge-1 for 9.000")
                .put(AGENT, "edge-1", lease(MEMBER_LEASE, holder))
                .observe(stopped(in_time));
            assert_eq!(history.violated_oracle(), oracle, "{holder} {in_time}");
        }
    }

    #[test]
    fn stopping_hub_that_still_leads_is_found() {
        for (holder, oracle) in [
            ("", None),
            ("hub/hub-0/1", Some("stopping-leader-hands-over")),
        ] {
            calm()
                .fault("stop hub-0 for 9.000")
                .put("hub-0", "home", lease(HUB_LEASE, holder))
                .wait(HANDOVER_TIME + 1)
                .respond("hub-0", "home", "GET", "/version", 200)
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn hub_that_precedes_an_agent_is_found() {
        for (pause, oracle) in [
            (AGENT_GRACE, None),
            (AGENT_GRACE - 1, Some("agent-precedes-proxy")),
        ] {
            let mut history = History::from_plan("edges edge-1:both");
            history
                .wait(AFTERMATH + 1)
                .enter_phase(Phase::Chaos)
                .renew_leases();
            history
                .fault("crash agent-edge-1 restart 99.000")
                .put(AGENT, "edge-1", lease(MEMBER_LEASE, ""))
                .wait(pause)
                .put("hub-0", "edge-1", lease(MEMBER_LEASE, "hub/hub-0/1/edge-1"));
            assert_eq!(history.violated_oracle(), oracle, "{pause}");
        }
    }

    #[test]
    fn hub_that_does_not_yield_is_found() {
        for (holder, broken) in [("agent/a/1", false), ("hub/hub-0/1/edge-1", true)] {
            let mut history = History::from_plan("hubs 1\nedges edge-1:both");
            history.put("hub-0", "home", edge_cluster("edge-1")).put(
                AGENT,
                "edge-1",
                lease(MEMBER_LEASE, holder),
            );
            let is_broken = history.breaks(AgentPrecedesProxy::default());
            assert_eq!(is_broken, broken, "{holder}");
        }
    }

    #[test]
    fn end_of_helm_without_a_cause_is_found() {
        let killed = |fault: &str, pause: Millis| {
            let mut history = calm();
            history
                .put("people", "edge-1", tenant())
                .renew_leases()
                .start_helm(1, AGENT, "upgrade", RELEASE)
                .fault(fault)
                .wait(pause)
                .observe(Event::HelmEnded {
                    run: 1,
                    host: AGENT.to_owned(),
                    end: HelmEnd::Killed,
                });
            history.violated_oracle().map(str::to_owned)
        };
        let violated = Some("helm-runs-to-its-end".to_owned());
        for (fault, pause, oracle) in [
            ("crash agent-edge-1 restart 9.000", 0, None),
            ("stop agent-edge-1 for 9.000", DRAIN_TIME, None),
            ("stop agent-edge-1 for 9.000", 1_000, violated.clone()),
            ("server home down for 99.000", 1_000, violated.clone()),
            ("stop hub-0 for 9.000", 1_000, violated),
        ] {
            assert_eq!(killed(fault, pause), oracle, "{fault}");
        }
    }

    #[test]
    fn new_leader_after_short_outage_is_found() {
        for (length, oracle) in [
            ("30.000", None),
            ("9.000", Some("outage-changes-no-leader")),
        ] {
            calm()
                .put("hub-0", "home", epoch(1))
                .fault(&format!("server home down for {length}"))
                .put("hub-0", "home", epoch(2))
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn work_after_restart_is_found() {
        for (edited, oracle) in [(true, None), (false, Some("restart-changes-nothing"))] {
            let mut history = calm();
            history
                .put("people", "edge-1", tenant())
                .fault("stop agent-edge-1 for 9.000");
            if edited {
                history.fault("tenant edge-1/t0 edit 1");
            }
            history
                .renew_leases()
                .start_helm(1, AGENT, "upgrade", RELEASE);
            assert_eq!(history.violated_oracle(), oracle, "{edited}");
        }
    }

    #[test]
    fn event_of_tenant_after_restart_is_found() {
        for (kind, oracle) in [
            ("EdgeCluster", None),
            ("Tenant", Some("restart-changes-nothing")),
        ] {
            let mut event = config_map("tenants", "t0.1");
            event["kind"] = json!("Event");
            event["involvedObject"] = json!({"kind": kind});
            calm()
                .put("people", "edge-1", tenant())
                .fault("stop agent-edge-1 for 9.000")
                .put(AGENT, "edge-1", event)
                .assert_outcome(oracle);
        }
    }
}
