//! The controllers of workloads, without pods: each workload becomes ready or complete.

use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::meta;
use crate::server::{ApiServer, Key};
use crate::store::Record;

pub(crate) fn is_workload(key: &Key) -> bool {
    matches!(
        (key.group.as_str(), key.resource.as_str()),
        (
            "apps",
            "deployments" | "statefulsets" | "daemonsets" | "replicasets"
        ) | ("batch", "jobs")
    )
}

/// Whether the specification is new.
pub(crate) fn needs_work(record: &Record) -> bool {
    let Some(after) = &record.after else {
        return false;
    };
    let before = record.before.as_ref();
    let known = before.map(|before| &before["metadata"]["generation"]);
    known != Some(&after["metadata"]["generation"])
}

impl ApiServer {
    /// Returns the revision of a Deployment, which counts the changes of its template.
    fn revision(&mut self, object: &Value) -> u64 {
        let uid = meta::text(object, "uid").to_owned();
        let annotation = &object["metadata"]["annotations"]["deployment.kubernetes.io/revision"];
        let recorded = annotation.as_str().and_then(|text| text.parse().ok());
        let template = &object["spec"]["template"];
        let first = (template.clone(), recorded.unwrap_or(1));
        let (known, revision) = self.templates.entry(uid).or_insert(first);
        if known != template {
            *known = template.clone();
            *revision += 1;
        }
        *revision
    }

    /// From now on, the pods of each Job that ends fail, or no longer do.
    pub fn fail_jobs(&mut self, fail: bool) {
        self.jobs_fail = fail;
    }

    pub(crate) fn sync_workload(&mut self, key: &Key, now: Timestamp) {
        let Some(object) = self.get(key) else {
            return;
        };
        if meta::is_terminating(&object) || object["spec"]["paused"] == true {
            return;
        }
        let mut next = (*object).clone();
        if key.resource == "deployments" {
            let revision = self.revision(&object);
            next["metadata"]["annotations"]["deployment.kubernetes.io/revision"] =
                revision.to_string().into();
        }
        next["status"] = match key.resource.as_str() {
            "deployments" => deployment(&object, now),
            "statefulsets" => stateful_set(&object),
            "daemonsets" => daemon_set(&object),
            "replicasets" => replica_set(&object),
            _ => match job(&object, now, self.jobs_fail) {
                Some(status) => status,
                None => return,
            },
        };
        self.controller_update(key, "status", now, next);
    }
}

fn replicas(object: &Value) -> u64 {
    object["spec"]["replicas"].as_u64().unwrap_or(1)
}

fn generation(object: &Value) -> Value {
    object["metadata"]["generation"].clone()
}

/// Returns the time of a known condition with the status `True`, or now.
fn since(object: &Value, condition: &str, now: Timestamp) -> Value {
    let known = object["status"]["conditions"].as_array();
    let mut known = known.into_iter().flatten();
    let known = known.find(|known| known["type"] == condition && known["status"] == "True");
    let since = known.map(|known| known["lastTransitionTime"].clone());
    since.unwrap_or_else(|| meta::seconds(now).into())
}

fn deployment(object: &Value, now: Timestamp) -> Value {
    let count = replicas(object);
    let name = meta::name(object);
    let at = meta::seconds(now);
    let mut status = json!({
        "observedGeneration": generation(object),
        "conditions": [
            {
                "type": "Available",
                "status": "True",
                "reason": "MinimumReplicasAvailable",
                "message": "Deployment has minimum availability.",
                "lastTransitionTime": since(object, "Available", now),
                "lastUpdateTime": since(object, "Available", now),
            },
            {
                "type": "Progressing",
                "status": "True",
                "reason": "NewReplicaSetAvailable",
                "message": format!("ReplicaSet \"{name}\" has successfully progressed."),
                "lastTransitionTime": since(object, "Progressing", now),
                "lastUpdateTime": at,
            },
        ],
    });
    if count > 0 {
        for field in [
            "replicas",
            "readyReplicas",
            "updatedReplicas",
            "availableReplicas",
        ] {
            status[field] = count.into();
        }
    }
    status
}

fn stateful_set(object: &Value) -> Value {
    let count = replicas(object);
    let revision = format!("{}-1", meta::name(object));
    json!({
        "observedGeneration": generation(object),
        "replicas": count,
        "readyReplicas": count,
        "currentReplicas": count,
        "updatedReplicas": count,
        "availableReplicas": count,
        "currentRevision": revision,
        "updateRevision": revision,
        "collisionCount": 0,
    })
}

fn daemon_set(object: &Value) -> Value {
    json!({
        "observedGeneration": generation(object),
        "currentNumberScheduled": 1,
        "desiredNumberScheduled": 1,
        "numberAvailable": 1,
        "numberMisscheduled": 0,
        "numberReady": 1,
        "updatedNumberScheduled": 1,
    })
}

fn replica_set(object: &Value) -> Value {
    let count = replicas(object);
    json!({
        "observedGeneration": generation(object),
        "replicas": count,
        "fullyLabeledReplicas": count,
        "readyReplicas": count,
        "availableReplicas": count,
    })
}

/// What the pods of a Job do, by the command of the first container: `false` fails, `sleep N` succeeds after N seconds,
/// and anything else succeeds at once.
enum Command {
    Succeeds(Duration),
    Fails,
}

fn command(job: &Value) -> Command {
    let command = &job["spec"]["template"]["spec"]["containers"][0]["command"];
    let seconds = command[1].as_str().and_then(|text| text.parse().ok());
    match (command[0].as_str(), seconds) {
        (Some("false"), _) => Command::Fails,
        (Some("sleep"), Some(seconds)) => Command::Succeeds(Duration::from_secs(seconds)),
        _ => Command::Succeeds(Duration::ZERO),
    }
}

/// The time that the pods of a new workload need.
pub(crate) fn duration(object: Option<&Value>) -> Duration {
    match object.map(command) {
        Some(Command::Succeeds(duration)) => duration,
        _ => Duration::ZERO,
    }
}

/// Returns the status of a Job that has ended, or `None` if it is suspended or ended before.
fn job(object: &Value, now: Timestamp, fails: bool) -> Option<Value> {
    let conditions = object["status"]["conditions"].as_array();
    let has_ended = conditions.is_some_and(|conditions| !conditions.is_empty());
    if has_ended || object["spec"]["suspend"] == true {
        return None;
    }
    let at = meta::seconds(now);
    let condition = |kind, reason, message| {
        json!({
            "type": kind,
            "status": "True",
            "reason": reason,
            "message": message,
            "lastProbeTime": at,
            "lastTransitionTime": at,
        })
    };
    if fails || matches!(command(object), Command::Fails) {
        let failed = |kind| {
            let message = "Job has reached the specified backoff limit";
            condition(kind, "BackoffLimitExceeded", message)
        };
        return Some(json!({
            "conditions": [failed("FailureTarget"), failed("Failed")],
            "startTime": object["metadata"]["creationTimestamp"],
            "failed": 1,
            "ready": 0,
            "terminating": 0,
            "uncountedTerminatedPods": {},
        }));
    }
    let complete = |kind| {
        let message = "Reached expected number of succeeded pods";
        condition(kind, "CompletionsReached", message)
    };
    Some(json!({
        "conditions": [complete("SuccessCriteriaMet"), complete("Complete")],
        "startTime": object["metadata"]["creationTimestamp"],
        "completionTime": at,
        "succeeded": object["spec"]["completions"].as_u64().unwrap_or(1),
        "ready": 0,
        "terminating": 0,
        "uncountedTerminatedPods": {},
    }))
}
