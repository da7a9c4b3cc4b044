//! Hooks of a release: the hook that Helm currently runs, and hooks for deletion. Helm stores each hook's
//! state before it runs the hook.

use k8s_openapi::api::core::v1::Secret;
use serde::Deserialize;

use super::{ReleaseError, stored};

#[derive(Deserialize)]
struct StoredHooks {
    #[serde(default)]
    namespace: String,
    hooks: Option<Vec<Hook>>,
}

#[derive(Deserialize)]
struct Hook {
    #[serde(default)]
    name: String,
    #[serde(default)]
    kind: String,
    events: Option<Vec<String>>,
    last_run: Option<LastRun>,
}

#[derive(Deserialize)]
struct LastRun {
    phase: Option<String>,
}

/// Returns whether an uninstallation runs any hook of the release.
///
/// # Errors
/// See [`super::decode`]. Does not check the name.
pub fn has_delete_hooks(secret: &Secret) -> Result<bool, ReleaseError> {
    let stored: StoredHooks = stored(secret)?;
    let hooks = stored.hooks.unwrap_or_default();
    let is_deletion = |event: &String| ["pre-delete", "post-delete"].contains(&event.as_str());
    Ok(hooks
        .iter()
        .any(|hook| hook.events.iter().flatten().any(is_deletion)))
}

/// Returns a description of the hook that Helm runs for this revision: "hook Job acme/migrate (pre-install)".
///
/// # Errors
/// See [`super::decode`]. Does not check the name.
pub fn running_hook(secret: &Secret) -> Result<Option<String>, ReleaseError> {
    let stored: StoredHooks = stored(secret)?;
    let namespace = &stored.namespace;
    let is_running = |hook: &&Hook| {
        let phase = hook.last_run.as_ref().and_then(|run| run.phase.as_deref());
        phase == Some("Running")
    };
    let hooks = stored.hooks.unwrap_or_default();
    Ok(hooks.iter().find(is_running).map(|hook| {
        let events = hook.events.as_deref().unwrap_or_default().join(", ");
        format!("hook {} {namespace}/{} ({events})", hook.kind, hook.name)
    }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::releases::packed_secret;

    #[test]
    fn the_one_that_runs_is_named() {
        let secret = |phases: [&str; 2]| {
            let hook = |(name, phase): (&str, &str)| {
                json!({
                    "name": name, "kind": "Job", "path": "a.yaml", "manifest": "kind: Job",
                    "events": ["pre-install", "pre-upgrade"],
                    "last_run": { "started_at": "2026-01-01T00:00:00Z", "phase": phase },
                })
            };
            let hooks: Vec<_> = ["one", "two"].into_iter().zip(phases).map(hook).collect();
            let release = json!({ "name": "r", "namespace": "acme", "hooks": hooks });
            packed_secret(&release.to_string())
        };
        let running = |phases| running_hook(&secret(phases)).unwrap();
        assert_eq!(
            running(["Succeeded", "Running"]).unwrap(),
            "hook Job acme/two (pre-install, pre-upgrade)"
        );
        assert_eq!(running(["Succeeded", ""]), None);
        assert!(running_hook(&Secret::default()).is_err());
    }
}
