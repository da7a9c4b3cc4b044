//! Explains a KryptonDeployment: its own conditions, and the members that have its release.

use jiff::Timestamp;
use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_types::conditions::{self, READY, TARGET_RESOLVED, Truth};
use kube::ResourceExt as _;

use super::super::remedy;
use super::super::sources::ObjectSources;
use super::{Explainer, Explanation, is_current, mark_for};
use crate::statement::Mark;

/// Reason of `Ready` if the chart or Helm failed.
const HELM_FAILED: &str = "HelmFailed";

pub(in crate::explain) fn explain_deployment(
    sources: &ObjectSources<KryptonDeployment>,
    now: Timestamp,
) -> Explanation {
    let mut explainer = Explainer::new(now);
    let is_ready = explainer.explain_object(&sources.object);
    let is_led = explainer.explain_leader(&sources.leader_lease, &sources.hub_namespaces);
    let is_connected = explainer.explain_placements(sources);
    let status = sources.object.status.iter();
    explainer.explain_history(status.flat_map(|status| &status.history));
    explainer.explain_events(&sources.events);
    Explanation {
        ready: is_led && is_connected && is_ready,
        lines: explainer.lines,
    }
}

impl Explainer {
    /// Returns whether the object is Ready.
    fn explain_object(&mut self, object: &KryptonDeployment) -> bool {
        let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
        let command =
            |verb: &str| format!("kubectl krypton {verb} deployment {name} -n {namespace}");
        let region = &object.spec.region.name;
        let text = format!("KryptonDeployment {namespace}/{name} names the region {region}");
        self.add(Mark::Ok, text);
        self.explain_metadata(object, &command("resume"));
        let status = object.status.clone().unwrap_or_default();
        let resolved = conditions::find(&status.conditions, TARGET_RESOLVED);
        if let Some(resolved) = resolved.filter(|it| it.truth != Truth::True) {
            let remedy = remedy::for_member(&resolved.reason);
            self.add_condition(mark_for(resolved.truth), &resolved, remedy);
        }
        let Some(ready) = conditions::find(&status.conditions, READY) else {
            self.add(Mark::Unknown, "it has no status yet");
            return false;
        };
        let retry = format!(
            "remove the cause, such as a wrong value; to retry now: {}",
            command("resync")
        );
        let remedy = match &*ready.reason {
            HELM_FAILED => Some(retry.as_str()),
            _ => remedy::for_waiting(&ready.message),
        };
        self.explain_readiness(object, status.observed_generation, &ready, remedy);
        if let Some(chart) = &status.last_applied_chart {
            let text = format!("the chart that was installed last is {chart}");
            self.add(Mark::Ok, text);
        }
        ready.truth == Truth::True && is_current(object, status.observed_generation)
    }

    /// Returns whether the members that keep the release are connected.
    fn explain_placements(&mut self, sources: &ObjectSources<KryptonDeployment>) -> bool {
        let status = sources.object.status.iter();
        let mut all_connected = true;
        for placement in status.flat_map(|status| status.placements.iter().flatten()) {
            let member = &placement.cluster;
            let Some(lookup) = sources.members.get(member) else {
                continue;
            };
            self.set_member(member);
            let is_connected = self.explain_member(member, lookup);
            all_connected &= is_connected || placement.removing;
            if placement.removing {
                self.add(Mark::Note, "the release is being uninstalled there");
            }
        }
        self.member = None;
        all_connected
    }
}
