//! Rules for fields that may differ: rules of users, and built-in rules.

use krypton_helm::releases::ObjectId;
use serde_json::Value;

use crate::drift::field_owner;
use crate::drift::json_pointer::{self, PointerStep};

/// Maximum number of rules in one annotation. An annotation may hold 256 KiB, and each rule walks through each object.
pub(crate) const MAX_RULES: usize = 64;
/// Prefix of the annotations that request an injection from cert-manager.
const INJECTION_PREFIX: &str = "cert-manager.io/inject-";

/// A field that may differ, with all fields below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IgnoreRule {
    /// Kind of the objects. `None` matches all kinds.
    kind: Option<String>,
    /// Name of the object. `None` matches all names.
    name: Option<String>,
    steps: Vec<PointerStep>,
}

/// Parses the rules of an annotation, separated by commas or whitespace: `/spec/replicas`, `Deployment:/spec/replicas`,
/// `Deployment/web:/spec/template/spec/containers/*/image`. The second result is an error message for invalid rules.
pub(crate) fn parse_rules(text: &str) -> (Vec<IgnoreRule>, Option<String>) {
    let words = text.split(|c: char| c == ',' || c.is_whitespace());
    let mut words = words.filter(|word| !word.is_empty());
    let mut rules = Vec::new();
    let mut error = None;
    for word in words.by_ref().take(MAX_RULES) {
        match parse_rule(word) {
            Some(rule) => rules.push(rule),
            None if error.is_none() => {
                let shown: String = word.chars().take(80).collect();
                error = Some(format!(
                    "{shown:?} is not a rule; write /POINTER, KIND:/POINTER or KIND/NAME:/POINTER"
                ));
            }
            None => {}
        }
    }
    if words.next().is_some() {
        error = Some(format!("only the first {MAX_RULES} rules count"));
    }
    (rules, error)
}

fn parse_rule(word: &str) -> Option<IgnoreRule> {
    let (object, pointer) = match word.split_once(':') {
        Some((object, pointer)) if !object.contains('/') || !word.starts_with('/') => {
            (object, pointer)
        }
        _ => ("", word),
    };
    let (kind, name) = match object.split_once('/') {
        Some((kind, name)) => (kind, Some(name.to_owned())),
        None => (object, None),
    };
    let kind = Some(kind).filter(|kind| !kind.is_empty());
    let steps = json_pointer::parse(pointer).filter(|steps| !steps.is_empty())?;
    (name.is_none() || kind.is_some()).then(|| IgnoreRule {
        kind: kind.map(str::to_owned),
        name,
        steps,
    })
}

impl IgnoreRule {
    fn for_any_object(pointer: &str) -> Option<Self> {
        Some(Self {
            kind: None,
            name: None,
            steps: json_pointer::parse(pointer)?,
        })
    }

    pub(super) fn applies_to(&self, object: &ObjectId) -> bool {
        self.kind.as_ref().is_none_or(|kind| *kind == object.kind)
            && self.name.as_ref().is_none_or(|name| *name == object.name)
    }

    /// Returns true if the rule points to the field or to a parent of it.
    pub(crate) fn covers(&self, pointer: &str) -> bool {
        let Some(field) = json_pointer::parse(pointer) else {
            return false;
        };
        let matches = |(rule, field): (&PointerStep, &PointerStep)| {
            *rule == PointerStep::Wildcard || rule == field
        };
        field.len() >= self.steps.len() && self.steps.iter().zip(&field).all(matches)
    }
}

/// Returns the built-in rules for an object.
pub(super) fn built_in_rules(object: &ObjectId, live: &Value) -> Vec<IgnoreRule> {
    let mut rules = Vec::new();
    // An autoscaler writes the scale subresource. A user who scales with kubectl wants a report.
    let is_autoscaled =
        field_owner::scale_managers(live).any(|manager| !manager.starts_with("kubectl"));
    if is_autoscaled {
        rules.extend(IgnoreRule::for_any_object("/spec/replicas"));
    }
    let annotations = live.pointer("/metadata/annotations");
    let is_injected = annotations
        .and_then(Value::as_object)
        .is_some_and(|map| map.keys().any(|key| key.starts_with(INJECTION_PREFIX)));
    if is_injected {
        let pointer = match object.kind.as_str() {
            "ValidatingWebhookConfiguration" | "MutatingWebhookConfiguration" => {
                "/webhooks/*/clientConfig/caBundle"
            }
            "CustomResourceDefinition" => "/spec/conversion/webhook/clientConfig/caBundle",
            "APIService" => "/spec/caBundle",
            _ => return rules,
        };
        rules.extend(IgnoreRule::for_any_object(pointer));
    }
    rules
}

/// Copies a field that may differ from the live object. Without it, the apply would remove the field, as Helm owns it.
pub(crate) fn copy_live_value(applied: &mut Value, live: &Value, rule: &IgnoreRule) {
    copy_live_steps(applied, live, &rule.steps);
}

fn copy_live_steps(applied: &mut Value, live: &Value, steps: &[PointerStep]) {
    let Some((step, rest)) = steps.split_first() else {
        applied.clone_from(live);
        return;
    };
    let matches = |key: &str| match step {
        PointerStep::Wildcard => true,
        PointerStep::Key(step) => step == key,
    };
    match applied {
        Value::Object(map) => map.retain(|key, child| match live.get(key) {
            _ if !matches(key) => true,
            Some(live_child) => {
                copy_live_steps(child, live_child, rest);
                true
            }
            None => !rest.is_empty(),
        }),
        Value::Array(items) => {
            for (index, item) in items.iter_mut().enumerate() {
                if matches(&index.to_string())
                    && let Some(live_item) = matching_item(item, index, live)
                {
                    copy_live_steps(item, live_item, rest);
                }
            }
        }
        _ => {}
    }
}

/// Returns the matching item of the live list: by name if the items have names, otherwise by index.
fn matching_item<'a>(item: &Value, index: usize, live: &'a Value) -> Option<&'a Value> {
    let items = live.as_array()?;
    match item.get("name") {
        Some(name) => items
            .iter()
            .find(|live_item| live_item.get("name") == Some(name)),
        None => items.get(index),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn id(kind: &str, name: &str) -> ObjectId {
        ObjectId {
            api_version: "v1".to_owned(),
            kind: kind.to_owned(),
            namespace: None,
            name: name.to_owned(),
        }
    }

    #[test]
    fn ignore_rule_covers_pointer_subtree_of_named_objects() {
        for (text, kind, name, pointer, expected) in [
            ("/spec/replicas", "Deployment", "a", "/spec/replicas", true),
            ("/spec", "Deployment", "a", "/spec/replicas", true),
            ("/spec/replicas", "Deployment", "a", "/spec", false),
            (
                "/spec/replicas",
                "Deployment",
                "a",
                "/spec/replicasX",
                false,
            ),
            ("Deployment:/spec", "Deployment", "a", "/spec/x", true),
            ("Deployment:/spec", "Service", "a", "/spec/x", false),
            ("Deployment/a:/spec", "Deployment", "a", "/spec/x", true),
            ("Deployment/a:/spec", "Deployment", "b", "/spec/x", false),
            ("/a/*/b", "X", "a", "/a/0/b/c", true),
            ("/a/*/b", "X", "a", "/a/0/c", false),
            ("/data/a~1b:c", "X", "a", "/data/a~1b:c", true),
        ] {
            let (rules, error) = parse_rules(text);
            assert_eq!((rules.len(), error), (1, None), "{text}");
            let covers = rules[0].applies_to(&id(kind, name)) && rules[0].covers(pointer);
            assert_eq!(covers, expected, "{text} {kind}/{name} {pointer}");
        }
    }

    #[test]
    fn invalid_ignore_rules_are_dropped_and_reported() {
        assert_eq!(parse_rules("/a,\n /b  Deployment:/c,").0.len(), 3);
        assert_eq!(parse_rules(""), (Vec::new(), None));
        for text in [
            "spec",
            "Deployment",
            "Deployment:spec",
            "/a/b,x",
            ":",
            "/x:",
            "Pod:",
            "/n:/",
        ] {
            let (rules, error) = parse_rules(text);
            let all_have_steps = rules.iter().all(|rule| !rule.steps.is_empty());
            assert!(all_have_steps, "{text}");
            let is_valid = ["/x:", "/n:/"].contains(&text);
            assert_eq!(error.is_none(), is_valid, "{text}");
        }
        let many = "/a ".repeat(MAX_RULES + 1);
        let (rules, error) = parse_rules(&many);
        assert!(rules.len() == MAX_RULES && error.is_some());
    }

    #[test]
    fn ignored_fields_are_applied_with_live_values() {
        let live = json!({
            "spec": {"replicas": 3},
            "webhooks": [{"name": "b", "clientConfig": {"caBundle": "B"}},
                         {"name": "a", "clientConfig": {"caBundle": "A"}}],
            "plain": [1, 2],
        });
        for (rule, applied, expected) in [
            (
                "/spec/replicas",
                json!({"spec": {"replicas": 1, "x": 1}}),
                json!({"spec": {"replicas": 3, "x": 1}}),
            ),
            (
                "/spec/replicas",
                json!({"spec": {"x": 1}}),
                json!({"spec": {"x": 1}}),
            ),
            (
                "/spec/gone",
                json!({"spec": {"gone": 1}}),
                json!({"spec": {}}),
            ),
            (
                "/gone/below",
                json!({"gone": {"below": 1}}),
                json!({"gone": {"below": 1}}),
            ),
            (
                "/webhooks/*/clientConfig/caBundle",
                json!({"webhooks": [{"name": "a", "clientConfig": {"caBundle": ""}}]}),
                json!({"webhooks": [{"name": "a", "clientConfig": {"caBundle": "A"}}]}),
            ),
            (
                "/plain/1",
                json!({"plain": [0, 0]}),
                json!({"plain": [0, 2]}),
            ),
            ("/plain/5", json!({"plain": [0]}), json!({"plain": [0]})),
        ] {
            let mut result = applied.clone();
            copy_live_value(&mut result, &live, &parse_rules(rule).0[0]);
            assert_eq!(result, expected, "{rule} {applied}");
        }
    }

    #[test]
    fn autoscaled_replicas_and_injected_ca_bundles_are_ignored() {
        let scaled = |manager: &str, subresource: Option<&str>| {
            json!({"metadata": {"managedFields": [{
                "manager": manager, "operation": "Update", "subresource": subresource,
                "fieldsV1": {"f:spec": {"f:replicas": {}}},
            }]}})
        };
        for (live, expected) in [
            (scaled("kube-controller-manager", Some("scale")), true),
            (scaled("keda", Some("scale")), true),
            (scaled("kubectl", Some("scale")), false),
            (scaled("kubectl-edit", None), false),
            (scaled("helm", None), false),
        ] {
            let rules = built_in_rules(&id("Deployment", "a"), &live);
            assert_eq!(!rules.is_empty(), expected, "{live}");
        }
        let live = json!({"metadata": {"annotations": {"cert-manager.io/inject-ca-from": "a/b"}}});
        for (kind, pointer) in [
            (
                "ValidatingWebhookConfiguration",
                "/webhooks/0/clientConfig/caBundle",
            ),
            (
                "MutatingWebhookConfiguration",
                "/webhooks/1/clientConfig/caBundle",
            ),
            (
                "CustomResourceDefinition",
                "/spec/conversion/webhook/clientConfig/caBundle",
            ),
            ("APIService", "/spec/caBundle"),
        ] {
            let rules = built_in_rules(&id(kind, "a"), &live);
            assert!(rules.iter().any(|rule| rule.covers(pointer)), "{kind}");
            assert!(
                !rules.iter().any(|rule| rule.covers("/spec/group")),
                "{kind}"
            );
            assert!(
                built_in_rules(&id(kind, "a"), &json!({})).is_empty(),
                "{kind}"
            );
        }
    }
}
