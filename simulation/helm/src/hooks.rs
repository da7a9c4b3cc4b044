//! Runs the hooks of a release.

use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep, timeout_at};

use crate::api::{Api, Object};
use crate::fault::{ErrorCause, HelmError};
use crate::objects::{self, WriteMethod};
use crate::release::{Hook, Release, now};
use crate::session::Session;

const BEFORE_CREATION: &str = "before-hook-creation";
const SUCCEEDED: &str = "hook-succeeded";
const FAILED: &str = "hook-failed";
/// Helm watches. Polling is simpler, and simulated time costs nothing.
const POLL: Duration = Duration::from_secs(1);

impl Session {
    /// Runs the hooks for an event unless a flag disables them, and stores their state in the release.
    pub(crate) async fn run_hooks(
        &self,
        release: &mut Release,
        event: &str,
        method: WriteMethod,
    ) -> Result<(), HelmError> {
        if self.flags.no_hooks {
            return Ok(());
        }
        let mut order: Vec<usize> = (0..release.hooks.len())
            .filter(|index| {
                release.hooks[*index]
                    .events
                    .iter()
                    .any(|hook_event| hook_event == event)
            })
            .collect();
        order.sort_by(|one, other| {
            let rank = |index: &usize| (release.hooks[*index].weight, &release.hooks[*index].name);
            rank(one).cmp(&rank(other))
        });
        for (completed, index) in order.iter().enumerate() {
            let result = self.run_hook(release, *index, event, method).await?;
            release.hooks[*index].last_run.completed_at = now();
            let phase = if result.is_ok() {
                "Succeeded"
            } else {
                "Failed"
            };
            phase.clone_into(&mut release.hooks[*index].last_run.phase);
            if let Err(error) = result {
                // Helm only logs an error of this deletion.
                let failed = &release.hooks[*index];
                drop(self.delete_by_policy(release, failed, FAILED).await);
                for earlier in order.iter().take(completed) {
                    let hook = &release.hooks[*earlier];
                    self.delete_by_policy(release, hook, SUCCEEDED).await?;
                }
                return Err(error);
            }
        }
        for index in order.iter().rev() {
            let hook = &release.hooks[*index];
            self.delete_by_policy(release, hook, SUCCEEDED).await?;
        }
        Ok(())
    }

    /// Creates a hook's object and waits for it. The inner result is the hook's.
    async fn run_hook(
        &self,
        release: &mut Release,
        index: usize,
        event: &str,
        method: WriteMethod,
    ) -> Result<Result<(), HelmError>, HelmError> {
        if release.hooks[index].delete_policies.is_empty() {
            release.hooks[index].delete_policies = vec![BEFORE_CREATION.to_owned()];
        }
        let hook = release.hooks[index].clone();
        self.delete_by_policy(release, &hook, BEFORE_CREATION)
            .await?;
        let built = self.api.build(&hook.manifest, &release.namespace).await;
        let objects = built.map_err(|error| {
            let path = &hook.path;
            error.context(format_args!(
                "unable to build kubernetes object for {event} hook {path}"
            ))
        })?;
        let last_run = &mut release.hooks[index].last_run;
        last_run.started_at = now();
        last_run.completed_at.clear();
        "Running".clone_into(&mut last_run.phase);
        self.record(release).await;
        "Unknown".clone_into(&mut release.hooks[index].last_run.phase);
        if let Err(error) = objects::create(&self.api, &objects, method.without_force()).await {
            let last_run = &mut release.hooks[index].last_run;
            last_run.completed_at = now();
            "Failed".clone_into(&mut last_run.phase);
            let path = &hook.path;
            return Err(error.context(format_args!("warning: Hook {event} {path} failed")));
        }
        Ok(wait_until_ready(&self.api, &objects, self.flags.timeout).await)
    }

    async fn delete_by_policy(
        &self,
        release: &Release,
        hook: &Hook,
        policy: &str,
    ) -> Result<(), HelmError> {
        let has_policy = hook
            .delete_policies
            .iter()
            .any(|hook_policy| hook_policy == policy);
        if hook.kind == "CustomResourceDefinition" || !has_policy {
            return Ok(());
        }
        let built = self.api.build(&hook.manifest, &release.namespace).await;
        let objects = built.map_err(|error| {
            let path = &hook.path;
            error.context(format_args!(
                "unable to build kubernetes object for deleting hook {path}"
            ))
        })?;
        let errors = objects::delete(&self.api, &objects).await;
        HelmError::join(&errors, "; ").map_or(Ok(()), Err)
    }
}

/// State of a hook's object.
struct HookState {
    name: &'static str,
    message: String,
}

/// Waits until jobs have completed and pods have succeeded. Other kinds are always ready.
async fn wait_until_ready(
    api: &Api,
    objects: &[Object],
    timeout: Duration,
) -> Result<(), HelmError> {
    let deadline = Instant::now() + timeout;
    loop {
        let mut is_waiting = false;
        let mut unready = Vec::new();
        for object in objects {
            // The last response counts at the deadline.
            let state = match timeout_at(deadline + POLL, api.get(object)).await {
                Ok(Ok(live)) => hook_state(object, &live),
                Ok(Err(error)) if error.is_not_found() => HookState {
                    name: "NotFound",
                    message: "Resource not found".to_owned(),
                },
                Ok(Err(error)) if matches!(error.cause, ErrorCause::Status { code: 403, .. }) => {
                    return Err(error);
                }
                Ok(Err(_)) | Err(_) => HookState {
                    name: "Unknown",
                    message: String::new(),
                },
            };
            is_waiting |= !["Current", "Failed"].contains(&state.name);
            if state.name != "Current" {
                unready.push(HelmError::new(format!(
                    "resource {}/{}/{} not ready. status: {}, message: {}",
                    object.kind, object.namespace, object.name, state.name, state.message
                )));
            }
        }
        let is_overdue = Instant::now() >= deadline;
        if is_waiting && !is_overdue {
            sleep(POLL.min(deadline - Instant::now())).await;
            continue;
        }
        if is_waiting {
            unready.push(HelmError::new("context deadline exceeded"));
        }
        return HelmError::join(&unready, "\n").map_or(Ok(()), Err);
    }
}

fn hook_state(object: &Object, live: &Value) -> HookState {
    let (name, message) = match (object.group(), object.kind.as_str()) {
        ("batch", "Job") => job_state(live),
        ("", "Pod") => pod_state(object, live),
        _ => ("Current", "Resource is current".to_owned()),
    };
    HookState { name, message }
}

fn job_state(live: &Value) -> (&'static str, String) {
    let number = |pointer: &str, default: i64| {
        let number = live.pointer(pointer).and_then(Value::as_i64);
        number.unwrap_or(default)
    };
    let completions = number("/spec/completions", number("/spec/parallelism", 1));
    let conditions = live.pointer("/status/conditions").and_then(Value::as_array);
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

fn pod_state(object: &Object, live: &Value) -> (&'static str, String) {
    match live["status"]["phase"].as_str() {
        Some("Succeeded") => ("Current", format!("pod {} succeeded", object.name)),
        Some("Failed") => ("Failed", format!("pod {} failed", object.name)),
        _ => ("InProgress", "Pod in progress".to_owned()),
    }
}
