//! Invariants of processes and their requests.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use krypton_crds::tenant::Tenant;
use kube::CustomResourceExt as _;

use super::view::own_cluster;
use super::{Check, Oracle, View, ensure, stateless};
use crate::conductor::Millis;
use crate::observe::{Event, Observation};
use crate::plan::{Access, Action, MemberAction};

/// Most requests of a host to a cluster in [`SPAN`].
const REQUESTS: usize = 1_500;
/// Part of the paths of Krypton's kinds.
const OURS: &str = "/apis/mesh.openkcm.io/";
const SPAN: Millis = 10_000;

pub(super) fn all() -> Vec<Box<dyn Oracle>> {
    vec![
        Box::new(NoPanic),
        Box::new(NoEnd),
        Box::new(ModelIsComplete),
        Box::new(RequestsAreValid),
        Box::new(AgentsStayHome),
        Box::new(HubsStayOut::default()),
        Box::new(RequestsAreBounded::default()),
        Box::new(WritesChange),
    ]
}

stateless! {
    /// No process panics.
    NoPanic, "no-panic",
    fn see(&mut self, _: &View, seen: &Observation) -> Check {
        match &seen.event {
            Event::Panicked { host, message } => Err(format!("{host}: {message}")),
            _ => Ok(()),
        }
    }
}

stateless! {
    /// No process ends by itself, except if an API server rejects its credentials.
    NoEnd, "no-process-ends",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        match &seen.event {
            Event::Ended { problem: Some(problem), .. }
                if problem.contains("rejects the credentials") && view.credentials_are_rejected() =>
            {
                Ok(())
            }
            Event::Ended { host, problem } => {
                Err(format!("{host}: {}", problem.as_deref().unwrap_or("without an error")))
            }
            _ => Ok(()),
        }
    }
}

stateless! {
    /// The simulated API server knows each request.
    ModelIsComplete, "model-is-complete",
    fn see(&mut self, _: &View, seen: &Observation) -> Check {
        match &seen.event {
            Event::Answered { host, method, path, code: 501, .. } => {
                Err(format!("{host} sends {method} {path}"))
            }
            _ => Ok(()),
        }
    }
}

stateless! {
    /// No request is malformed.
    RequestsAreValid, "requests-are-valid",
    fn see(&mut self, _: &View, seen: &Observation) -> Check {
        match &seen.event {
            Event::Answered { host, method, path, code: code @ (400 | 405 | 406 | 415), .. } => {
                Err(format!("{host} gets {code} for {method} {path}"))
            }
            _ => Ok(()),
        }
    }
}

stateless! {
    /// An agent talks to the API server of its own cluster only.
    AgentsStayHome, "agents-stay-on-their-cluster",
    fn see(&mut self, _: &View, seen: &Observation) -> Check {
        let Event::Answered { host, cluster, .. } = &seen.event else {
            return Ok(());
        };
        let own = own_cluster(host).is_none_or(|own| own == cluster);
        ensure(own, || format!("{host} talks to {cluster}"))
    }
}

/// A hub talks to the home cluster and to clusters with a kubeconfig only.
#[derive(Debug, Default)]
struct HubsStayOut {
    /// Members with a second kubeconfig at some time.
    twins: BTreeSet<String>,
}

impl Oracle for HubsStayOut {
    fn name(&self) -> &'static str {
        "hubs-need-a-kubeconfig"
    }

    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        if let Event::Fault { text } = &seen.event
            && let Ok(Action::Member { member, what }) = text.parse()
            && matches!(what, MemberAction::AddTwin { .. })
        {
            self.twins.insert(member);
        }
        let Event::Answered { host, cluster, .. } = &seen.event else {
            return Ok(());
        };
        let mut edges = view.settings.edges.iter();
        let agent = edges.any(|edge| edge.name == *cluster && edge.access == Access::Agent);
        let agent = agent && !self.twins.contains(cluster);
        ensure(!agent || !host.starts_with("hub-"), || {
            format!("{host} talks to {cluster}")
        })
    }
}

stateless! {
    /// Krypton writes no object of its own kinds without a change, if no fault has hidden an earlier write.
    WritesChange, "writes-change-something",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Event::Answered { host, cluster, method, path, code: 200, .. } = &seen.event else {
            return Ok(());
        };
        let writes = ["PUT", "PATCH"].contains(&method.as_str()) && path.contains(OURS);
        let writes = writes && !path.contains("dryRun");
        // A process lets go of each Tenant before its CRD disappears.
        let vain = writes && view.is_unchanged(cluster) && view.has_crd(cluster, Tenant::crd_name());
        ensure(!vain, || format!("{host} changes nothing with {method} {path}"))
    }
}

/// A process does not flood an API server, whatever it answers.
#[derive(Debug, Default)]
struct RequestsAreBounded {
    times: BTreeMap<(String, String), VecDeque<Millis>>,
}

impl Oracle for RequestsAreBounded {
    fn name(&self) -> &'static str {
        "requests-are-bounded"
    }

    fn see(&mut self, _: &View, seen: &Observation) -> Check {
        let Event::Answered { host, cluster, .. } = &seen.event else {
            return Ok(());
        };
        let times = self
            .times
            .entry((host.clone(), cluster.clone()))
            .or_default();
        times.push_back(seen.at);
        while times.front().is_some_and(|first| seen.at - first > SPAN) {
            times.pop_front();
        }
        ensure(times.len() <= REQUESTS, || {
            format!("{host} sends {} requests to {cluster} in 10 s", times.len())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::story::Story;
    use super::*;

    fn answered(code: u16) -> Story {
        let mut story = Story::new();
        story.answered("hub-0", "home", "GET", "/version", code);
        story
    }

    #[test]
    fn panic_is_found() {
        let mut story = Story::new();
        story.see(Event::Started {
            host: "hub-0".to_owned(),
        });
        story.assert_kept();
        story.see(Event::Panicked {
            host: "hub-0".to_owned(),
            message: "oh".to_owned(),
        });
        story.assert_broken("no-panic");
    }

    #[test]
    fn end_of_a_process_is_found() {
        let mut story = Story::new();
        story.fault("crash hub-0 restart 1.000");
        story.assert_kept();
        story.see(Event::Ended {
            host: "hub-0".to_owned(),
            problem: None,
        });
        story.assert_broken("no-process-ends");
    }

    #[test]
    fn unknown_or_malformed_request_is_found() {
        for code in [200, 404, 409, 422, 500, 503] {
            answered(code).assert_kept();
        }
        answered(501).assert_broken("model-is-complete");
        answered(400).assert_broken("requests-are-valid");
        answered(415).assert_broken("requests-are-valid");
    }

    #[test]
    fn agent_on_another_cluster_is_found() {
        let mut story = Story::new();
        story.answered("agent-edge-1", "edge-1", "GET", "/version", 200);
        story.assert_kept();
        story.answered("agent-edge-1", "home", "GET", "/version", 200);
        story.assert_broken("agents-stay-on-their-cluster");
    }

    #[test]
    fn hub_on_a_cluster_with_agent_is_found() {
        let mut story = Story::new();
        story.answered("hub-0", "edge-2", "GET", "/version", 200);
        story.assert_kept();
        story.answered("hub-0", "edge-1", "GET", "/version", 200);
        story.assert_broken("hubs-need-a-kubeconfig");
    }

    #[test]
    fn write_without_a_change_is_found() {
        let path = "https://10.0.0.1:6443/apis/mesh.openkcm.io/v1alpha1/tenants/t0";
        for (method, oracle) in [("GET", None), ("PUT", Some("writes-change-something"))] {
            let mut story = Story::new();
            story.answered("hub-0", "home", method, path, 200);
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn flood_of_requests_is_found() {
        for (pause, oracle) in [(20, None), (5, Some("requests-are-bounded"))] {
            let mut story = Story::new();
            for _ in 0..2_000 {
                story
                    .wait(pause)
                    .answered("hub-0", "home", "GET", "/version", 503);
            }
            assert_eq!(story.violated(), oracle, "{pause}");
        }
    }
}
