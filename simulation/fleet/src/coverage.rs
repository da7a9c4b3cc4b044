//! Counts of the states that runs have reached.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use krypton_sim_apiserver::server::Change;
use serde_json::Value;

use crate::observe::{Event, HelmEnd, Observation};
use crate::plan::Action;

/// Counts by point. Call [`Coverage::record`] with each observation, and [`Coverage::merge`] with the counts of other
/// runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    counts: BTreeMap<String, u64>,
    /// Running Helm processes with their hosts and verbs.
    running: BTreeMap<u64, (String, String)>,
}

impl Coverage {
    pub fn record(&mut self, observation: &Observation) {
        match &observation.event {
            Event::Responded {
                method, path, code, ..
            } => self.count(format!("api {} {code}", request_kind(method, path))),
            Event::RequestLost { method, path, .. } => {
                self.count(format!("api {method} {} lost", resource_of(path)));
            }
            Event::HelmStarted {
                run,
                host,
                arguments,
            } => {
                let verb = arguments.first().cloned().unwrap_or_default();
                self.running.insert(*run, (host.clone(), verb));
            }
            Event::HelmEnded { run, end, .. } => {
                let running = self.running.remove(run);
                let verb = running.map(|(_, verb)| verb).unwrap_or_default();
                match end {
                    HelmEnd::Exited { code, .. } => self.count(format!("helm {verb} exit {code}")),
                    HelmEnd::Killed => self.count(format!("helm {verb} killed")),
                }
            }
            Event::Fault { .. } => self.count_fault(&observation.event),
            Event::Change { change, .. } => self.count_new_conditions(change),
            Event::ProcessStarted { host } => self.count(format!("process {} started", role(host))),
            Event::ProcessEnded { host, .. } => self.count(format!("process {} ended", role(host))),
            Event::ProcessStopped { host, .. } => {
                self.count(format!("process {} stopped", role(host)))
            }
            Event::ProcessPanicked { host, .. } => {
                self.count(format!("process {} panicked", role(host)))
            }
            Event::Log { .. } => {}
        }
    }

    /// Adds the counts of a run.
    pub fn merge(&mut self, other: &Self) {
        for (point, count) in &other.counts {
            *self.counts.entry(point.clone()).or_default() += count;
        }
    }

    /// Number of different points.
    pub fn points(&self) -> usize {
        self.counts.len()
    }

    /// Methods and resources of the writes that were carried out.
    pub fn writes(&self) -> BTreeSet<&str> {
        let requests = self
            .counts
            .keys()
            .filter_map(|point| point.strip_prefix("api "));
        let succeeded = requests.filter_map(|request| {
            request
                .strip_suffix(" 200")
                .or(request.strip_suffix(" 201"))
        });
        succeeded
            .filter(|request| !request.starts_with("GET ") && !request.starts_with("WATCH "))
            .collect()
    }

    fn count(&mut self, point: String) {
        *self.counts.entry(point).or_default() += 1;
    }

    fn count_fault(&mut self, event: &Event) {
        let Some((action, false)) = event.action() else {
            return;
        };
        self.count(format!("fault {}", action_kind(&action)));
        if let Action::Crash { host, .. } = &action {
            let verbs: Vec<String> = self
                .running
                .values()
                .filter(|(running, _)| running == host)
                .map(|(_, verb)| verb.clone())
                .collect();
            for verb in verbs {
                self.count(format!("crash {} during helm {verb}", role(host)));
            }
        }
    }

    fn count_new_conditions(&mut self, change: &Change) {
        let Some(after) = &change.after else {
            return;
        };
        let before: Vec<(&str, &str, &str)> = conditions(change.before.as_deref()).collect();
        let points: Vec<String> = conditions(Some(after))
            .filter(|condition| !before.contains(condition))
            .map(|(kind, status, reason)| {
                // The part after the slash is the name of a cluster.
                let kind = kind.split('/').next().unwrap_or_default();
                let resource = &change.key.resource;
                format!("condition {resource} {kind}={status} {reason}")
            })
            .collect();
        for point in points {
            self.count(point);
        }
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (point, count) in &self.counts {
            writeln!(f, "{count:>9} {point}")?;
        }
        Ok(())
    }
}

/// Verb and resource of a request, without names.
pub(crate) fn request_kind(method: &str, path: &str) -> String {
    let (_, query) = path.split_once('?').unwrap_or_default();
    let is_watch = query.contains("watch=true") || query.contains("watch=1");
    let verb = if is_watch { "WATCH" } else { method };
    format!("{verb} {}", resource_of(path))
}

/// The resource and subresource of a path, without names.
fn resource_of(path: &str) -> String {
    let path = path.split('?').next().unwrap_or_default();
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let rest = match parts.as_slice() {
        ["api", _, rest @ ..] | ["apis", _, _, rest @ ..] => rest,
        _ => return path.to_owned(),
    };
    match rest {
        [] => path.to_owned(),
        ["namespaces", _, resource] | ["namespaces", _, resource, _] => (*resource).to_owned(),
        ["namespaces", _, resource, _, sub] => format!("{resource}/{sub}"),
        [resource] | [resource, _] => (*resource).to_owned(),
        [resource, _, sub, ..] => format!("{resource}/{sub}"),
    }
}

fn role(host: &str) -> &str {
    host.split('-').next().unwrap_or_default()
}

/// The text of an action without its targets and numbers.
pub(crate) fn action_kind(action: &Action) -> String {
    let text = action.to_string();
    let words: Vec<&str> = text.split_whitespace().collect();
    match words.as_slice() {
        [verb @ ("tenant" | "member" | "deployment"), _, detail, ..] => format!("{verb} {detail}"),
        ["link", _, _, _, detail, ..] => format!("link {detail}"),
        ["server", _, detail, ..] => format!("server {detail}"),
        [verb, _, "at-request", ..] => format!("{verb} at-request"),
        [verb, ..] => (*verb).to_owned(),
        [] => String::new(),
    }
}

fn conditions(object: Option<&Value>) -> impl Iterator<Item = (&str, &str, &str)> {
    let all = object.and_then(|object| object.pointer("/status/conditions")?.as_array());
    all.into_iter().flatten().map(|condition| {
        let text = |field: &str| condition.get(field).and_then(Value::as_str);
        (
            text("type").unwrap_or_default(),
            text("status").unwrap_or_default(),
            text("reason").unwrap_or_default(),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observation(event: Event) -> Observation {
        Observation { at: 0, event }
    }

    fn answered(path: &str) -> Observation {
        observation(Event::Responded {
            host: "hub-0".to_owned(),
            nth: 1,
            cluster: "home".to_owned(),
            method: "GET".to_owned(),
            path: path.to_owned(),
            code: 200,
            from_fault: false,
        })
    }

    #[test]
    fn paths_become_resources_without_names() {
        for (path, resource) in [
            ("/api/v1/namespaces/krypton-system", "namespaces"),
            ("/api/v1/namespaces/a/secrets/b", "secrets"),
            ("/api/v1/secrets?labelSelector=x", "secrets"),
            (
                "/apis/mesh.openkcm.io/v1alpha1/namespaces/a/tenants/b/status",
                "tenants/status",
            ),
            (
                "/apis/mesh.openkcm.io/v1alpha1/edgeclusters/b/status",
                "edgeclusters/status",
            ),
            ("/version", "/version"),
            ("/apis/apps/v1", "/apis/apps/v1"),
        ] {
            assert_eq!(resource_of(path), resource, "{path}");
        }
    }

    #[test]
    fn crash_during_helm_run_is_a_point() {
        let mut coverage = Coverage::default();
        coverage.record(&observation(Event::HelmStarted {
            run: 1,
            host: "agent-edge-1".to_owned(),
            arguments: vec!["upgrade".to_owned()],
        }));
        coverage.record(&observation(Event::Fault {
            text: "crash agent-edge-1 restart 1.000".to_owned(),
        }));
        coverage.record(&observation(Event::HelmEnded {
            run: 1,
            host: "agent-edge-1".to_owned(),
            end: HelmEnd::Killed,
        }));
        let points: Vec<&String> = coverage.counts.keys().collect();
        assert_eq!(
            points,
            [
                "crash agent during helm upgrade",
                "fault crash",
                "helm upgrade killed"
            ]
        );
    }

    #[test]
    fn merge_adds_counts() {
        let (mut all, mut one) = (Coverage::default(), Coverage::default());
        all.record(&answered("/version"));
        one.record(&answered("/version"));
        one.record(&answered("/api/v1/pods"));
        all.merge(&one);
        assert_eq!(all.points(), 2);
        assert_eq!(
            all.to_string(),
            "        2 api GET /version 200\n        1 api GET pods 200\n"
        );
    }
}
