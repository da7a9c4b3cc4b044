//! Runs the hooks of a release.

use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep, timeout_at};

use crate::api::{Api, Object};
use crate::fault::{Cause, Fault};
use crate::objects::{self, Way};
use crate::release::{Hook, Release, now};
use crate::session::Session;

const BEFORE_CREATION: &str = "before-hook-creation";
const SUCCEEDED: &str = "hook-succeeded";
const FAILED: &str = "hook-failed";
/// Helm watches. Polling is simpler, and simulated time costs nothing.
const POLL: Duration = Duration::from_secs(1);

impl Session {
    /// Runs the hooks for an event, and stores their state in the release.
    pub(crate) async fn run_hooks(
        &self,
        release: &mut Release,
        event: &str,
        way: Way,
    ) -> Result<(), Fault> {
        let mut order: Vec<usize> = (0..release.hooks.len())
            .filter(|at| release.hooks[*at].events.iter().any(|on| on == event))
            .collect();
        order.sort_by(|one, other| {
            let rank = |at: &usize| (release.hooks[*at].weight, &release.hooks[*at].name);
            rank(one).cmp(&rank(other))
        });
        for (done, at) in order.iter().enumerate() {
            let waited = self.run_hook(release, *at, event, way).await?;
            release.hooks[*at].last_run.completed_at = now();
            let phase = if waited.is_ok() {
                "Succeeded"
            } else {
                "Failed"
            };
            phase.clone_into(&mut release.hooks[*at].last_run.phase);
            if let Err(fault) = waited {
                // Helm only logs an error of this deletion.
                let failed = &release.hooks[*at];
                drop(self.delete_by_policy(release, failed, FAILED).await);
                for earlier in order.iter().take(done) {
                    let hook = &release.hooks[*earlier];
                    self.delete_by_policy(release, hook, SUCCEEDED).await?;
                }
                return Err(fault);
            }
        }
        for at in order.iter().rev() {
            let hook = &release.hooks[*at];
            self.delete_by_policy(release, hook, SUCCEEDED).await?;
        }
        Ok(())
    }

    /// Creates a hook's object and waits for it. The inner result is the hook's.
    async fn run_hook(
        &self,
        release: &mut Release,
        at: usize,
        event: &str,
        way: Way,
    ) -> Result<Result<(), Fault>, Fault> {
        if release.hooks[at].delete_policies.is_empty() {
            release.hooks[at].delete_policies = vec![BEFORE_CREATION.to_owned()];
        }
        let hook = release.hooks[at].clone();
        self.delete_by_policy(release, &hook, BEFORE_CREATION)
            .await?;
        let built = self.api.build(&hook.manifest, &release.namespace).await;
        let objects = built.map_err(|fault| {
            let path = &hook.path;
            fault.within(format_args!(
                "unable to build kubernetes object for {event} hook {path}"
            ))
        })?;
        let last_run = &mut release.hooks[at].last_run;
        last_run.started_at = now();
        last_run.completed_at.clear();
        "Running".clone_into(&mut last_run.phase);
        self.record(release).await;
        "Unknown".clone_into(&mut release.hooks[at].last_run.phase);
        if let Err(fault) = objects::create(&self.api, &objects, way.gently()).await {
            let last_run = &mut release.hooks[at].last_run;
            last_run.completed_at = now();
            "Failed".clone_into(&mut last_run.phase);
            let path = &hook.path;
            return Err(fault.within(format_args!("warning: Hook {event} {path} failed")));
        }
        Ok(ready(&self.api, &objects, self.flags.timeout).await)
    }

    async fn delete_by_policy(
        &self,
        release: &Release,
        hook: &Hook,
        policy: &str,
    ) -> Result<(), Fault> {
        let wanted = hook.delete_policies.iter().any(|its| its == policy);
        if hook.kind == "CustomResourceDefinition" || !wanted {
            return Ok(());
        }
        let built = self.api.build(&hook.manifest, &release.namespace).await;
        let objects = built.map_err(|fault| {
            let path = &hook.path;
            fault.within(format_args!(
                "unable to build kubernetes object for deleting hook {path}"
            ))
        })?;
        let faults = objects::delete(&self.api, &objects).await;
        Fault::joined(&faults, "; ").map_or(Ok(()), Err)
    }
}

/// State of a hook's object.
struct State {
    name: &'static str,
    message: String,
}

/// Waits until jobs have completed and pods have succeeded. Other kinds are always ready.
async fn ready(api: &Api, objects: &[Object], timeout: Duration) -> Result<(), Fault> {
    let deadline = Instant::now() + timeout;
    loop {
        let mut waits = false;
        let mut unready = Vec::new();
        for object in objects {
            // The last answer counts at the deadline.
            let state = match timeout_at(deadline + POLL, api.get(object)).await {
                Ok(Ok(found)) => state(object, &found),
                Ok(Err(fault)) if fault.is_not_found() => State {
                    name: "NotFound",
                    message: "Resource not found".to_owned(),
                },
                Ok(Err(fault)) if matches!(fault.cause, Cause::Status { code: 403, .. }) => {
                    return Err(fault);
                }
                Ok(Err(_)) | Err(_) => State {
                    name: "Unknown",
                    message: String::new(),
                },
            };
            waits |= !["Current", "Failed"].contains(&state.name);
            if state.name != "Current" {
                unready.push(Fault::new(format!(
                    "resource {}/{}/{} not ready. status: {}, message: {}",
                    object.kind, object.namespace, object.name, state.name, state.message
                )));
            }
        }
        let late = Instant::now() >= deadline;
        if waits && !late {
            sleep(POLL.min(deadline - Instant::now())).await;
            continue;
        }
        if waits {
            unready.push(Fault::new("context deadline exceeded"));
        }
        return Fault::joined(&unready, "\n").map_or(Ok(()), Err);
    }
}

fn state(object: &Object, found: &Value) -> State {
    let (name, message) = match (object.group(), object.kind.as_str()) {
        ("batch", "Job") => job(found),
        ("", "Pod") => pod(object, found),
        _ => ("Current", "Resource is current".to_owned()),
    };
    State { name, message }
}

fn job(found: &Value) -> (&'static str, String) {
    let number = |pointer: &str, default: i64| {
        let number = found.pointer(pointer).and_then(Value::as_i64);
        number.unwrap_or(default)
    };
    let completions = number("/spec/completions", number("/spec/parallelism", 1));
    let conditions = found
        .pointer("/status/conditions")
        .and_then(Value::as_array);
    let conditions = conditions.into_iter().flatten();
    for condition in conditions.filter(|condition| condition["status"] == "True") {
        if condition["type"] == "Complete" {
            return ("Current", "Job Completed".to_owned());
        }
        if condition["type"] == "Failed" {
            let failed = number("/status/failed", 0);
            return (
                "Failed",
                format!("Job Failed. failed: {failed}/{completions}"),
            );
        }
    }
    ("InProgress", "Job in progress".to_owned())
}

fn pod(object: &Object, found: &Value) -> (&'static str, String) {
    match found["status"]["phase"].as_str() {
        Some("Succeeded") => ("Current", format!("pod {} succeeded", object.name)),
        Some("Failed") => ("Failed", format!("pod {} failed", object.name)),
        _ => ("InProgress", "Pod in progress".to_owned()),
    }
}
