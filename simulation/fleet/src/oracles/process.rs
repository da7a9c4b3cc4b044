//! Invariants of processes and their requests.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use krypton_crds::tenant::Tenant;
use kube::CustomResourceExt as _;

use super::view::agent_cluster;
use super::{CheckResult, Oracle, View, ensure, invariant};
use crate::observe::{Event, Observation};
use crate::plan::{Access, Action, HOME, MemberAction};
use crate::time::Millis;

/// Most requests of a host to a cluster in [`REQUEST_WINDOW`].
const MAX_REQUESTS: usize = 1_500;
/// Part of the paths of Krypton's kinds.
const KRYPTON_API_PATH: &str = "/apis/mesh.openkcm.io/";
const REQUEST_WINDOW: Millis = 10_000;
/// Parts of the errors with which a process ends if its API server rejects it.
const REJECTIONS: [&str; 4] = [
    "rejects the credentials",
    "check the credentials",
    "is not allowed to",
    "grant the missing permission",
];

invariant! {
    /// No process panics.
    NoPanic, "no-panic",
    fn check_observation(&mut self, _: &View, observation: &Observation) -> CheckResult {
        match &observation.event {
            Event::ProcessPanicked { host, message } => Err(format!("{host}: {message}")),
            _ => Ok(()),
        }
    }
}

invariant! {
    /// No process exits without a request or a fault, unless its API server rejects its credentials or a right is missing.
    NoProcessEnds, "no-process-ends",
    fn check_observation(&mut self, view: &View, observation: &Observation) -> CheckResult {
        match &observation.event {
            Event::ProcessEnded { host, error: Some(error) }
                if REJECTIONS.iter().any(|part| error.contains(part))
                    && view.rejects_requests(agent_cluster(host).unwrap_or(HOME)) =>
            {
                Ok(())
            }
            Event::ProcessEnded { host, error } => {
                Err(format!("{host}: {}", error.as_deref().unwrap_or("without an error")))
            }
            _ => Ok(()),
        }
    }
}

invariant! {
    /// The simulated API server knows each request.
    ModelIsComplete, "model-is-complete",
    fn check_observation(&mut self, _: &View, observation: &Observation) -> CheckResult {
        match &observation.event {
            Event::Responded { host, method, path, code: 501, .. } => {
                Err(format!("{host} sends {method} {path}"))
            }
            _ => Ok(()),
        }
    }
}

invariant! {
    /// No request is malformed.
    RequestsAreValid, "requests-are-valid",
    fn check_observation(&mut self, _: &View, observation: &Observation) -> CheckResult {
        match &observation.event {
            Event::Responded { host, method, path, code: code @ (400 | 405 | 406 | 415), .. } => {
                Err(format!("{host} gets {code} for {method} {path}"))
            }
            _ => Ok(()),
        }
    }
}

invariant! {
    /// An agent sends requests only to the API server of its cluster.
    AgentsStayOnTheirCluster, "agents-stay-on-their-cluster",
    fn check_observation(&mut self, _: &View, observation: &Observation) -> CheckResult {
        let Event::Responded { host, cluster, .. } = &observation.event else {
            return Ok(());
        };
        let is_own_cluster = agent_cluster(host).is_none_or(|own| own == cluster);
        ensure(is_own_cluster, || format!("{host} talks to {cluster}"))
    }
}

invariant! {
    /// A hub talks to the home cluster and to clusters with a kubeconfig only.
    HubsNeedAKubeconfig {
        /// Members with a second kubeconfig at some time.
        twins: BTreeSet<String>,
    },
    "hubs-need-a-kubeconfig",
    fn check_observation(&mut self, view: &View, observation: &Observation) -> CheckResult {
        if let Some((Action::Member { member, action }, _)) = observation.event.action()
            && matches!(action, MemberAction::AddTwin { .. })
        {
            self.twins.insert(member);
        }
        let Event::Responded { host, cluster, .. } = &observation.event else {
            return Ok(());
        };
        let mut edges = view.settings.edges.iter();
        let is_agent_only = edges.any(|edge| edge.name == *cluster && edge.access == Access::Agent);
        let is_agent_only = is_agent_only && !self.twins.contains(cluster);
        ensure(!is_agent_only || !host.starts_with("hub-"), || {
            format!("{host} talks to {cluster}")
        })
    }
}

invariant! {
    /// Krypton never writes a Tenant, EdgeCluster or KryptonDeployment without a change, if no fault has hidden an earlier
    /// write.
    WritesChangeSomething, "writes-change-something",
    fn check_observation(&mut self, view: &View, observation: &Observation) -> CheckResult {
        let Event::Responded { host, cluster, method, path, code: 200, from_fault: false, .. } = &observation.event
        else {
            return Ok(());
        };
        let is_write = ["PUT", "PATCH"].contains(&method.as_str()) && path.contains(KRYPTON_API_PATH);
        let is_write = is_write && !path.contains("dryRun");
        // A process removes its finalizer from each Tenant before the CRD disappears.
        let is_useless = is_write && view.is_unchanged(cluster) && view.has_crd(cluster, Tenant::crd_name());
        ensure(!is_useless, || format!("{host} changes nothing with {method} {path}"))
    }
}

invariant! {
    /// A process does not flood an API server, regardless of its responses.
    RequestsAreBounded {
        request_times: BTreeMap<(String, String), VecDeque<Millis>>,
    },
    "requests-are-bounded",
    fn check_observation(&mut self, _: &View, observation: &Observation) -> CheckResult {
        let Event::Responded { host, cluster, .. } = &observation.event else {
            return Ok(());
        };
        let request_times = self
            .request_times
            .entry((host.clone(), cluster.clone()))
            .or_default();
        request_times.push_back(observation.at);
        while request_times
            .front()
            .is_some_and(|first| observation.at - first > REQUEST_WINDOW)
        {
            request_times.pop_front();
        }
        ensure(request_times.len() <= MAX_REQUESTS, || {
            format!(
                "{host} sends {} requests to {cluster} in 10 s",
                request_times.len()
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::story::History;
    use super::*;

    fn answered(code: u16) -> History {
        let mut history = History::new();
        history.respond("hub-0", "home", "GET", "/version", code);
        history
    }

    #[test]
    fn panic_is_found() {
        let mut history = History::new();
        history.observe(Event::ProcessStarted {
            host: "hub-0".to_owned(),
        });
        history.assert_no_violation();
        history.observe(Event::ProcessPanicked {
            host: "hub-0".to_owned(),
            message: "oh".to_owned(),
        });
        history.assert_violated("no-panic");
    }

    #[test]
    fn end_of_a_process_is_found() {
        let mut history = History::new();
        history.fault("crash hub-0 restart 1.000");
        history.assert_no_violation();
        history.observe(Event::ProcessEnded {
            host: "hub-0".to_owned(),
            error: None,
        });
        history.assert_violated("no-process-ends");
    }

    #[test]
    fn process_may_end_only_if_rejected() {
        let rejected = "reading Secret a/b failed; grant the missing permission";
        for (fault, error, oracle) in [
            ("server edge-1 403 on secrets", rejected, None),
            (
                "server edge-1 401",
                "the cluster rejects the credentials",
                None,
            ),
            (
                "server edge-1 403",
                "reading Secret a/b failed",
                Some("no-process-ends"),
            ),
            ("server edge-1 410", rejected, Some("no-process-ends")),
            ("server edge-2 403", rejected, Some("no-process-ends")),
        ] {
            let mut history = History::new();
            history.fault(&format!("{fault} for 10.000"));
            history.observe(Event::ProcessEnded {
                host: "agent-edge-1".to_owned(),
                error: Some(error.to_owned()),
            });
            history.assert_outcome(oracle);
        }
    }

    #[test]
    fn unknown_or_malformed_request_is_found() {
        for code in [200, 404, 409, 422, 500, 503] {
            answered(code).assert_no_violation();
        }
        answered(501).assert_violated("model-is-complete");
        answered(400).assert_violated("requests-are-valid");
        answered(415).assert_violated("requests-are-valid");
    }

    #[test]
    fn agent_on_another_cluster_is_found() {
        let mut history = History::new();
        history.respond("agent-edge-1", "edge-1", "GET", "/version", 200);
        history.assert_no_violation();
        history.respond("agent-edge-1", "home", "GET", "/version", 200);
        history.assert_violated("agents-stay-on-their-cluster");
    }

    #[test]
    fn hub_on_a_cluster_with_agent_is_found() {
        let mut history = History::new();
        history.respond("hub-0", "edge-2", "GET", "/version", 200);
        history.assert_no_violation();
        history.respond("hub-0", "edge-1", "GET", "/version", 200);
        history.assert_violated("hubs-need-a-kubeconfig");
    }

    #[test]
    fn write_without_a_change_is_found() {
        let path = "https://10.0.0.1:6443/apis/mesh.openkcm.io/v1alpha1/tenants/t0";
        for (method, oracle) in [("GET", None), ("PUT", Some("writes-change-something"))] {
            History::new()
                .respond("hub-0", "home", method, path, 200)
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn response_of_a_fault_is_ignored() {
        for (from_fault, oracle) in [(true, None), (false, Some("writes-change-something"))] {
            History::new()
                .observe(Event::Responded {
                    host: "hub-0".to_owned(),
                    nth: 1,
                    cluster: "home".to_owned(),
                    method: "PATCH".to_owned(),
                    path: "/apis/mesh.openkcm.io/v1alpha1/edgeclusters/edge-1/status".to_owned(),
                    code: 200,
                    from_fault,
                })
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn flood_of_requests_is_found() {
        for (pause, oracle) in [(20, None), (5, Some("requests-are-bounded"))] {
            let mut history = History::new();
            for _ in 0..2_000 {
                history
                    .wait(pause)
                    .respond("hub-0", "home", "GET", "/version", 503);
            }
            assert_eq!(history.violated_oracle(), oracle, "{pause}");
        }
    }
}
