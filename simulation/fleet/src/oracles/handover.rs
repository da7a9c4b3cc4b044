//! Invariants of processes that stop, restart, or take over from each other.

use std::collections::{BTreeMap, BTreeSet};

use krypton_types::names::{EPOCH_CONFIG_MAP, HUB_LEASE};

use super::leases::MEMBER_LEASE;
use super::releases::started;
use super::view::{condition, holder, is_krypton, is_product, own_cluster, replaced, text};
use super::{Check, Oracle, Phase, View, Writer, ensure};
use crate::conductor::Millis;
use crate::faults::END;
use crate::observe::{Event, HelmEnd, Observation};
use crate::plan::{Access, Action, FOREVER, HOME, TenantAction};

/// Time in which a fault that has ended may still have effects.
const AFTERMATH: Millis = 120_000;
/// A hub waits 60 s for a lost agent. It counts from the agent's last report.
const GRACE: Millis = 42_000;
/// A stopping leader releases its Lease in this time.
const HANDS_OVER: Millis = 5_000;
/// A stopping process lets Helm run this long.
const DRAINS: Millis = 14_000;
/// Longest outage of home that changes no leader.
const SHORT: Millis = 20_000;

pub(super) fn all() -> Vec<Box<dyn Oracle>> {
    vec![
        Box::new(StopsEnd::default()),
        Box::new(LeadIsReleased::default()),
        Box::new(AgentPrecedes::default()),
        Box::new(HelmCompletes::default()),
        Box::new(OutageKeepsLeader::default()),
        Box::new(RestartChangesNothing::default()),
    ]
}

/// The last action that an invariant does not expect.
#[derive(Debug, Default)]
struct Trouble {
    until: Millis,
}

impl Trouble {
    /// Returns whether the observation is an action that was not expected.
    fn see(&mut self, seen: &Observation, expected: impl Fn(&Action) -> bool) -> bool {
        let Some(action) = action_of(seen).filter(|action| !expected(action)) else {
            return false;
        };
        let length = action.length().unwrap_or_default();
        let end = seen
            .at
            .saturating_add(length)
            .saturating_add(action.lingers());
        self.until = self.until.max(end);
        true
    }

    fn is_over(&self, now: Millis) -> bool {
        now > self.until.saturating_add(AFTERMATH)
    }
}

/// The action that begins or ends.
fn action_of(seen: &Observation) -> Option<Action> {
    let Event::Fault { text } = &seen.event else {
        return None;
    };
    text.strip_prefix(END).unwrap_or(text).parse().ok()
}

/// Whether the action changes only what Krypton installs.
fn changes_content(action: &Action) -> bool {
    matches!(
        action,
        Action::Tenant { .. } | Action::Deployment { .. } | Action::Values { .. }
    )
}

fn changes_content_or_stops(action: &Action) -> bool {
    changes_content(action) || matches!(action, Action::Stop { .. })
}

/// A process that gets SIGTERM ends in time, and no Lease names it afterwards.
#[derive(Debug, Default)]
struct StopsEnd {
    trouble: Trouble,
}

impl Oracle for StopsEnd {
    fn name(&self) -> &'static str {
        "stopped-process-ends"
    }

    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        self.trouble.see(seen, changes_content_or_stops);
        let Event::Stopped { host, in_time } = &seen.event else {
            return Ok(());
        };
        if !self.trouble.is_over(seen.at) {
            return Ok(());
        }
        ensure(*in_time, || format!("{host} does not end"))?;
        for cluster in view.settings.clusters() {
            for lease in [HUB_LEASE, MEMBER_LEASE] {
                let held = view.renewal(&cluster, lease).is_some_and(|renewal| {
                    renewal.host.as_ref() == Some(host) && !renewal.holder.is_empty()
                });
                ensure(!held, || {
                    format!("{host} has ended, and holds {lease} on {cluster}")
                })?;
            }
        }
        Ok(())
    }
}

/// A leader that gets SIGTERM lets another hub lead while it waits for Helm.
#[derive(Debug, Default)]
struct LeadIsReleased {
    trouble: Trouble,
    /// Times of the last SIGTERM.
    stopped: BTreeMap<String, Millis>,
}

impl Oracle for LeadIsReleased {
    fn name(&self) -> &'static str {
        "stopping-leader-hands-over"
    }

    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        self.trouble.see(seen, changes_content_or_stops);
        match &seen.event {
            Event::Started { host } => drop(self.stopped.remove(host)),
            Event::Fault { .. } => {
                if let Some(Action::Stop { host, .. }) = action_of(seen) {
                    self.stopped.insert(host, seen.at);
                }
            }
            _ => {}
        }
        let Some(renewal) = view.renewal(HOME, HUB_LEASE) else {
            return Ok(());
        };
        let stopped = renewal
            .host
            .as_ref()
            .and_then(|host| self.stopped.get(host));
        let late = stopped.is_some_and(|at| seen.at > at + HANDS_OVER);
        ensure(
            renewal.holder.is_empty() || !late || !self.trouble.is_over(seen.at),
            || format!("{} got SIGTERM, and still leads", renewal.holder),
        )
    }
}

/// A hub acts on a member with an agent only after the agent was away for some time, and not after its return.
#[derive(Debug, Default)]
struct AgentPrecedes {
    trouble: Trouble,
    /// When each agent last used its API server.
    acted: BTreeMap<String, Millis>,
    /// Members whose agent never returns.
    lost: BTreeSet<String>,
}

impl Oracle for AgentPrecedes {
    fn name(&self) -> &'static str {
        "agent-precedes-proxy"
    }

    fn see(&mut self, _: &View, seen: &Observation) -> Check {
        self.trouble.see(seen, |action| {
            changes_content(action)
                || restarted(action).is_some_and(|(host, _)| own_cluster(host).is_some())
        });
        if let Event::Answered { host, cluster, .. } = &seen.event
            && own_cluster(host).is_some()
        {
            self.acted.insert(cluster.clone(), seen.at);
        }
        if let Some(action) = action_of(seen)
            && let Some((host, FOREVER)) = restarted(&action)
        {
            self.lost.extend(own_cluster(host).map(str::to_owned));
        }
        Ok(())
    }

    fn wrote(&mut self, view: &View, by: &Writer<'_>) -> Check {
        let (key, after) = (&by.change.key, by.change.after.as_deref());
        let takes = key.resource == "leases"
            && key.name == MEMBER_LEASE
            && after.is_some_and(|after| holder(after).starts_with("hub/"))
            && by
                .change
                .before
                .as_deref()
                .is_none_or(|before| !holder(before).starts_with("hub/"));
        if !takes || view.phase < Phase::Chaos || !self.trouble.is_over(view.now) {
            return Ok(());
        }
        let acted = self.acted.get(by.cluster);
        ensure(acted.is_none_or(|at| view.now - at >= GRACE), || {
            format!(
                "{} takes {} from an agent that has just acted",
                by.host, by.cluster
            )
        })
    }

    fn quiet(&mut self, view: &View) -> Check {
        for edge in &view.settings.edges {
            if edge.access != Access::Both || !view.must_converge(&edge.name) {
                continue;
            }
            let by = match self.lost.contains(&edge.name) {
                true => "hub/",
                false => "agent/",
            };
            let renewal = view.renewal(&edge.name, MEMBER_LEASE);
            let right = renewal.is_some_and(|renewal| renewal.holder.starts_with(by));
            ensure(right, || {
                format!("not {by} but {renewal:?} acts on {}", edge.name)
            })?;
        }
        Ok(())
    }
}

/// The host whose program ends and starts again, and the time that it is away.
fn restarted(action: &Action) -> Option<(&str, Millis)> {
    match action {
        Action::Crash {
            host,
            restart: length,
        }
        | Action::Stop { host, length } => Some((host, *length)),
        _ => None,
    }
}

/// Helm runs to its end, whatever happens to the home cluster and to other hosts.
#[derive(Debug, Default)]
struct HelmCompletes {
    /// The last cause for a process to end its Helm runs, by its host.
    trouble: BTreeMap<String, Trouble>,
    /// Times of the last SIGTERM.
    stopped: BTreeMap<String, Millis>,
}

impl Oracle for HelmCompletes {
    fn name(&self) -> &'static str {
        "helm-runs-to-its-end"
    }

    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        for host in view.settings.hosts() {
            let trouble = self.trouble.entry(host.clone()).or_default();
            trouble.see(seen, |action| spares(action, &host));
        }
        if let Some(Action::Stop { host, .. }) = action_of(seen) {
            self.stopped.insert(host, seen.at);
        }
        let Event::HelmEnded { host, how, .. } = &seen.event else {
            return Ok(());
        };
        let ended = match how {
            HelmEnd::Killed => true,
            HelmEnd::Exited { code, stderr } => *code != 0 && stderr.contains("context canceled"),
        };
        let calm = self
            .trouble
            .get(host)
            .is_some_and(|trouble| trouble.is_over(seen.at));
        let mut stopped = self.stopped.get(host).into_iter();
        let drained = stopped.any(|at| seen.at - at >= DRAINS && seen.at - at <= AFTERMATH);
        ensure(!ended || !calm || drained, || {
            format!("{host} ends its Helm without a cause: {how:?}")
        })
    }
}

/// Whether the action gives this host no reason to end Helm.
fn spares(action: &Action, host: &str) -> bool {
    match action {
        Action::Server { cluster, .. }
        | Action::EndWatches { cluster }
        | Action::Compact { cluster } => cluster == HOME,
        Action::Link { from, to, .. } | Action::HalfOpen { from, to } => {
            let ends = [from, to];
            !ends.iter().any(|end| *end == host) || !ends.iter().any(|end| end.starts_with("edge-"))
        }
        Action::Crash { host: other, .. } | Action::Freeze { host: other, .. } => other != host,
        Action::Tenant { what, .. } => matches!(
            what,
            TenantAction::Create { .. } | TenantAction::Edit { .. }
        ),
        Action::Stop { .. } | Action::Values { .. } | Action::RotateCa => true,
        _ => false,
    }
}

/// A short outage of home changes neither the leader nor the connections of members.
#[derive(Debug, Default)]
struct OutageKeepsLeader {
    trouble: Trouble,
}

impl Oracle for OutageKeepsLeader {
    fn name(&self) -> &'static str {
        "outage-changes-no-leader"
    }

    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        self.trouble.see(seen, |action| {
            changes_content(action) || is_short_outage(action)
        });
        let calm =
            self.trouble.is_over(seen.at) && view.phase >= Phase::Chaos && view.excused.is_none();
        let Some((HOME, change, before, after)) = replaced(seen).filter(|_| calm) else {
            return Ok(());
        };
        let key = &change.key;
        let epoch = key.name == EPOCH_CONFIG_MAP && is_krypton(&change.by);
        ensure(!epoch, || "a hub takes a new epoch".to_owned())?;
        let connected = |object| condition(object, "Connected").map(|(status, _)| status);
        let lost = key.resource == "edgeclusters"
            && connected(before) == Some("True")
            && connected(after) != Some("True");
        ensure(!lost, || format!("{} is no longer connected", key.name))
    }
}

fn is_short_outage(action: &Action) -> bool {
    let short = action.length().is_some_and(|length| length <= SHORT);
    matches!(action, Action::Server { cluster, .. } if cluster == HOME) && short
}

/// Processes that restart in an idle fleet neither run Helm nor write Tenants, releases or events of Tenants.
#[derive(Debug, Default)]
struct RestartChangesNothing {
    trouble: Trouble,
    /// Whether only restarts have happened since the fleet was idle.
    idle: bool,
}

impl Oracle for RestartChangesNothing {
    fn name(&self) -> &'static str {
        "restart-changes-nothing"
    }

    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let restarts = |action: &Action| restarted(action).is_some();
        if action_of(seen).is_some_and(|action| restarts(&action)) {
            self.idle |= self.trouble.is_over(seen.at);
        }
        if self
            .trouble
            .see(seen, |action| self.idle && restarts(action))
        {
            self.idle = false;
        }
        if !self.idle || view.upgrades_fail() || view.excused.is_some() || view.any_damaged() {
            return Ok(());
        }
        if let Some(run) = started(view, seen) {
            return Err(format!(
                "{} runs helm {} for {}",
                run.host, run.verb, run.release
            ));
        }
        let Event::Change { cluster, change } = &seen.event else {
            return Ok(());
        };
        let of_tenant = change.key.resource == "events"
            && change
                .after
                .as_deref()
                .is_some_and(|event| text(event, "/involvedObject/kind") == "Tenant");
        let kept = change.key.resource == "tenants" || of_tenant;
        ensure(!kept || !is_product(&change.by), || {
            format!("{} writes {} on {cluster}", change.by, change.key.name)
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::story::{Story, config_map, edge_cluster, lease, tenant};
    use super::*;

    const AGENT: &str = "agent-edge-1";
    const RELEASE: &str = "tenant-t0-edge-1";

    /// A fleet without faults for some time.
    fn calm() -> Story {
        let mut story = Story::new();
        story.wait(AFTERMATH + 1).enter(Phase::Chaos).renew();
        story
    }

    fn stopped(in_time: bool) -> Event {
        let host = AGENT.to_owned();
        Event::Stopped { host, in_time }
    }

    #[test]
    fn stop_without_end_or_release_is_found() {
        for (holder, in_time, oracle) in [
            ("", true, None),
            ("", false, Some("stopped-process-ends")),
            ("agent/a/1", true, Some("stopped-process-ends")),
        ] {
            let mut story = calm();
            story
                .fault("stop agent-edge-1 for 9.000")
                .put(AGENT, "edge-1", lease(MEMBER_LEASE, holder))
                .see(stopped(in_time));
            assert_eq!(story.violated(), oracle, "{holder} {in_time}");
        }
    }

    #[test]
    fn stopping_leader_that_leads_is_found() {
        for (holder, oracle) in [
            ("", None),
            ("hub/hub-0/1", Some("stopping-leader-hands-over")),
        ] {
            let mut story = calm();
            story
                .fault("stop hub-0 for 9.000")
                .put("hub-0", "home", lease(HUB_LEASE, holder))
                .wait(HANDS_OVER + 1)
                .answered("hub-0", "home", "GET", "/version", 200);
            assert_eq!(story.violated(), oracle, "{holder}");
        }
    }

    #[test]
    fn hub_that_precedes_an_agent_is_found() {
        for (pause, oracle) in [(GRACE, None), (GRACE - 1, Some("agent-precedes-proxy"))] {
            let mut story = Story::of("edges edge-1:both");
            story.wait(AFTERMATH + 1).enter(Phase::Chaos).renew();
            story
                .fault("crash agent-edge-1 restart 99.000")
                .put(AGENT, "edge-1", lease(MEMBER_LEASE, ""))
                .wait(pause)
                .put("hub-0", "edge-1", lease(MEMBER_LEASE, "hub/hub-0/1/edge-1"));
            assert_eq!(story.violated(), oracle, "{pause}");
        }
    }

    #[test]
    fn hub_that_does_not_yield_is_found() {
        for (holder, right) in [("agent/a/1", true), ("hub/hub-0/1/edge-1", false)] {
            let mut story = Story::of("hubs 1\nedges edge-1:both");
            story.put("hub-0", "home", edge_cluster("edge-1")).put(
                AGENT,
                "edge-1",
                lease(MEMBER_LEASE, holder),
            );
            let check = AgentPrecedes::default().quiet(story.view());
            assert_eq!(check.is_ok(), right, "{holder}");
        }
    }

    #[test]
    fn end_of_helm_without_a_cause_is_found() {
        let killed = |fault: &str, pause: Millis| {
            let mut story = calm();
            story
                .put("people", "edge-1", tenant())
                .renew()
                .helm(1, AGENT, "upgrade", RELEASE)
                .fault(fault)
                .wait(pause)
                .see(Event::HelmEnded {
                    run: 1,
                    host: AGENT.to_owned(),
                    how: HelmEnd::Killed,
                });
            story.violated().map(str::to_owned)
        };
        let found = Some("helm-runs-to-its-end".to_owned());
        for (fault, pause, oracle) in [
            ("crash agent-edge-1 restart 9.000", 0, None),
            ("stop agent-edge-1 for 9.000", DRAINS, None),
            ("stop agent-edge-1 for 9.000", 1_000, found.clone()),
            ("server home down for 99.000", 1_000, found.clone()),
            ("stop hub-0 for 9.000", 1_000, found),
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
            let with = |epoch: &str| {
                let mut map = config_map("krypton-system", EPOCH_CONFIG_MAP);
                map["data"] = json!({"epoch": epoch});
                map
            };
            let mut story = calm();
            story
                .put("hub-0", "home", with("1"))
                .fault(&format!("server home down for {length}"))
                .put("hub-0", "home", with("2"));
            assert_eq!(story.violated(), oracle, "{length}");
        }
    }

    #[test]
    fn work_after_restart_is_found() {
        for (edited, oracle) in [(true, None), (false, Some("restart-changes-nothing"))] {
            let mut story = calm();
            story
                .put("people", "edge-1", tenant())
                .fault("stop agent-edge-1 for 9.000");
            if edited {
                story.fault("tenant edge-1/t0 edit 1");
            }
            story.renew().helm(1, AGENT, "upgrade", RELEASE);
            assert_eq!(story.violated(), oracle, "{edited}");
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
            let mut story = calm();
            story
                .put("people", "edge-1", tenant())
                .fault("stop agent-edge-1 for 9.000")
                .put(AGENT, "edge-1", event);
            assert_eq!(story.violated(), oracle, "{kind}");
        }
    }
}
