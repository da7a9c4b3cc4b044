//! The controllers of workloads, without pods: each workload becomes ready or complete.

use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::key::Key;
use crate::meta;
use crate::server::ApiServer;
use crate::store::WriteRecord;

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
pub(crate) fn needs_sync(record: &WriteRecord) -> bool {
    let Some(after) = &record.after else {
        return false;
    };
    let before = record.before.as_ref();
    let observed = before.map(|before| &before["metadata"]["generation"]);
    observed != Some(&after["metadata"]["generation"])
}

impl ApiServer {
    /// Returns the revision of a Deployment, which counts the changes of its template.
    fn deployment_revision(&mut self, object: &Value) -> u64 {
        let uid = meta::text(object, "uid").to_owned();
        let annotation = &object["metadata"]["annotations"]["deployment.kubernetes.io/revision"];
        let recorded = annotation.as_str().and_then(|text| text.parse().ok());
        let new_template = &object["spec"]["template"];
        let initial = (new_template.clone(), recorded.unwrap_or(1));
        let (template, revision) = self.deployment_revisions.entry(uid).or_insert(initial);
        if template != new_template {
            *template = new_template.clone();
            *revision += 1;
        }
        *revision
    }

    /// From now on, the pods of each Job that ends fail, or no longer do.
    pub fn fail_jobs(&mut self, jobs_fail: bool) {
        self.jobs_fail = jobs_fail;
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
            let revision = self.deployment_revision(&object);
            next["metadata"]["annotations"]["deployment.kubernetes.io/revision"] =
                revision.to_string().into();
        }
        next["status"] = match key.resource.as_str() {
            "deployments" => deployment_status(&object, now),
            "statefulsets" => stateful_set_status(&object),
            "daemonsets" => daemon_set_status(&object),
            "replicasets" => replica_set_status(&object),
            _ => match job_status(&object, now, self.jobs_fail) {
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

fn deployment_status(object: &Value, now: Timestamp) -> Value {
    let count = replicas(object);
    let name = meta::name(object);
    let at = meta::format_time(now);
    let since = |condition| meta::transition_time(object, condition, "True", now);
    let mut status = json!({
        "observedGeneration": generation(object),
        "conditions": [
            {
                "type": "Available",
                "status": "True",
                "reason": "MinimumReplicasAvailable",
                "message": "Deployment has minimum availability.",
                "lastTransitionTime": since("Available"),
                "lastUpdateTime": since("Available"),
            },
            {
                "type": "Progressing",
                "status": "True",
                "reason": "NewReplicaSetAvailable",
                "message": format!("ReplicaSet \"{name}\" has successfully progressed."),
                "lastTransitionTime": since("Progressing"),
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

fn stateful_set_status(object: &Value) -> Value {
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

fn daemon_set_status(object: &Value) -> Value {
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

fn replica_set_status(object: &Value) -> Value {
    let count = replicas(object);
    json!({
        "observedGeneration": generation(object),
        "replicas": count,
        "fullyLabeledReplicas": count,
        "readyReplicas": count,
        "availableReplicas": count,
    })
}

/// Outcome of the pods of a Job, by the command of the first container. `false` fails, `sleep N` succeeds after N
/// seconds, and any other command succeeds immediately.
enum JobOutcome {
    Succeeds(Duration),
    Fails,
}

fn job_outcome(job: &Value) -> JobOutcome {
    let command = &job["spec"]["template"]["spec"]["containers"][0]["command"];
    let seconds = command[1].as_str().and_then(|text| text.parse().ok());
    match (command[0].as_str(), seconds) {
        (Some("false"), _) => JobOutcome::Fails,
        (Some("sleep"), Some(seconds)) => JobOutcome::Succeeds(Duration::from_secs(seconds)),
        _ => JobOutcome::Succeeds(Duration::ZERO),
    }
}

/// The time that the pods of a new workload need.
pub(crate) fn completion_delay(object: Option<&Value>) -> Duration {
    match object.map(job_outcome) {
        Some(JobOutcome::Succeeds(duration)) => duration,
        _ => Duration::ZERO,
    }
}

/// Returns the status of a Job that has ended, or `None` if it is suspended or ended before.
fn job_status(object: &Value, now: Timestamp, jobs_fail: bool) -> Option<Value> {
    let conditions = object["status"]["conditions"].as_array();
    let has_ended = conditions.is_some_and(|conditions| !conditions.is_empty());
    if has_ended || object["spec"]["suspend"] == true {
        return None;
    }
    let at = meta::format_time(now);
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
    if jobs_fail || matches!(job_outcome(object), JobOutcome::Fails) {
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
