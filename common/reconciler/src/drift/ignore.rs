//! Rules for fields that may differ: rules of users, and built-in rules.

use krypton_helm::releases::ObjectId;
use serde_json::Value;

use crate::drift::field_owner;
use crate::drift::json_pointer::{Step, steps};

/// Maximum number of rules in one annotation. An annotation may hold 256 KiB, and each rule walks through each object.
pub(crate) const MOST: usize = 64;
/// Prefix of the annotations that request an injection from cert-manager.
const INJECTED: &str = "cert-manager.io/inject-";

/// A field that may differ, with all fields below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Kind of the objects. `None` matches all kinds.
    kind: Option<String>,
    /// Name of the object. `None` matches all names.
    name: Option<String>,
    steps: Vec<Step>,
}

/// Parses the rules of an annotation, separated by commas or whitespace: `/spec/replicas`, `Deployment:/spec/replicas`,
/// `Deployment/web:/spec/template/spec/containers/*/image`. The second result is an error message for invalid rules.
pub(crate) fn read(text: &str) -> (Vec<Rule>, Option<String>) {
    let words = text.split(|c: char| c == ',' || c.is_whitespace());
    let mut words = words.filter(|word| !word.is_empty());
    let mut rules = Vec::new();
    let mut wrong = None;
    for word in words.by_ref().take(MOST) {
        match rule(word) {
            Some(rule) => rules.push(rule),
            None if wrong.is_none() => {
                let shown: String = word.chars().take(80).collect();
                wrong = Some(format!(
                    "{shown:?} is not a rule; write /POINTER, KIND:/POINTER or KIND/NAME:/POINTER"
                ));
            }
            None => {}
        }
    }
    if words.next().is_some() {
        wrong = Some(format!("only the first {MOST} rules count"));
    }
    (rules, wrong)
}

fn rule(word: &str) -> Option<Rule> {
    let (of, pointer) = match word.split_once(':') {
        Some((of, pointer)) if !of.contains('/') || !word.starts_with('/') => (of, pointer),
        _ => ("", word),
    };
    let (kind, name) = match of.split_once('/') {
        Some((kind, name)) => (kind, Some(name.to_owned())),
        None => (of, None),
    };
    let whole = Some(kind).filter(|kind| !kind.is_empty());
    let steps = steps(pointer).filter(|steps| !steps.is_empty())?;
    (name.is_none() || whole.is_some()).then(|| Rule {
        kind: whole.map(str::to_owned),
        name,
        steps,
    })
}

impl Rule {
    fn anywhere(pointer: &str) -> Option<Self> {
        Some(Self {
            kind: None,
            name: None,
            steps: steps(pointer)?,
        })
    }

    pub(super) fn is_for(&self, object: &ObjectId) -> bool {
        self.kind.as_ref().is_none_or(|kind| *kind == object.kind)
            && self.name.as_ref().is_none_or(|name| *name == object.name)
    }

    /// Returns true if the rule points to the field or to a parent of it.
    pub(crate) fn covers(&self, pointer: &str) -> bool {
        let Some(field) = steps(pointer) else {
            return false;
        };
        let same = |(rule, field): (&Step, &Step)| *rule == Step::Any || rule == field;
        field.len() >= self.steps.len() && self.steps.iter().zip(&field).all(same)
    }
}

/// Returns the built-in rules for an object.
pub(super) fn well_known(object: &ObjectId, live: &Value) -> Vec<Rule> {
    let mut rules = Vec::new();
    // An autoscaler writes the scale subresource. A user who scales with kubectl wants a report.
    let scaled = field_owner::scales(live).any(|manager| !manager.starts_with("kubectl"));
    if scaled {
        rules.extend(Rule::anywhere("/spec/replicas"));
    }
    let annotations = live.pointer("/metadata/annotations");
    let injected = annotations
        .and_then(Value::as_object)
        .is_some_and(|map| map.keys().any(|key| key.starts_with(INJECTED)));
    if injected {
        let pointer = match object.kind.as_str() {
            "ValidatingWebhookConfiguration" | "MutatingWebhookConfiguration" => {
                "/webhooks/*/clientConfig/caBundle"
            }
            "CustomResourceDefinition" => "/spec/conversion/webhook/clientConfig/caBundle",
            "APIService" => "/spec/caBundle",
            _ => return rules,
        };
        rules.extend(Rule::anywhere(pointer));
    }
    rules
}

/// Copies a field that may differ from the live object. Without it, the apply would remove the field, as Helm owns it.
pub(crate) fn keep(applied: &mut Value, live: &Value, rule: &Rule) {
    keep_from(applied, live, &rule.steps);
}

fn keep_from(applied: &mut Value, live: &Value, steps: &[Step]) {
    let Some((step, rest)) = steps.split_first() else {
        return;
    };
    let is = |key: &str| match step {
        Step::Any => true,
        Step::Of(step) => step == key,
    };
    match applied {
        Value::Object(map) => {
            let keys: Vec<String> = map.keys().filter(|key| is(key)).cloned().collect();
            for key in keys {
                match live.get(&key) {
                    Some(there) if rest.is_empty() => {
                        map.insert(key, there.clone());
                    }
                    Some(there) => {
                        if let Some(child) = map.get_mut(&key) {
                            keep_from(child, there, rest);
                        }
                    }
                    None if rest.is_empty() => {
                        map.remove(&key);
                    }
                    None => {}
                }
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter_mut().enumerate() {
                if is(&index.to_string())
                    && let Some(there) = partner(item, index, live)
                {
                    if rest.is_empty() {
                        *item = there.clone();
                    } else {
                        keep_from(item, there, rest);
                    }
                }
            }
        }
        _ => {}
    }
}

/// Returns the matching item of the live list: by name if the items have names, otherwise by index.
fn partner<'a>(item: &Value, index: usize, live: &'a Value) -> Option<&'a Value> {
    let items = live.as_array()?;
    match item.get("name") {
        Some(name) => items.iter().find(|there| there.get("name") == Some(name)),
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
            let (rules, wrong) = read(text);
            assert_eq!((rules.len(), wrong), (1, None), "{text}");
            let covers = rules[0].is_for(&id(kind, name)) && rules[0].covers(pointer);
            assert_eq!(covers, expected, "{text} {kind}/{name} {pointer}");
        }
    }

    #[test]
    fn invalid_ignore_rules_are_dropped_and_reported() {
        assert_eq!(read("/a,\n /b  Deployment:/c,").0.len(), 3);
        assert_eq!(read(""), (Vec::new(), None));
        for wrong in [
            "spec",
            "Deployment",
            "Deployment:spec",
            "/a/b,x",
            ":",
            "/x:",
            "Pod:",
            "/n:/",
        ] {
            let (rules, told) = read(wrong);
            let harmless = rules.iter().all(|rule| !rule.steps.is_empty());
            assert!(harmless, "{wrong}");
            let fine = ["/x:", "/n:/"].contains(&wrong);
            assert_eq!(told.is_none(), fine, "{wrong}");
        }
        let many = "/a ".repeat(MOST + 1);
        let (rules, told) = read(&many);
        assert!(rules.len() == MOST && told.is_some());
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
            let mut found = applied.clone();
            keep(&mut found, &live, &read(rule).0[0]);
            assert_eq!(found, expected, "{rule} {applied}");
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
            let rules = well_known(&id("Deployment", "a"), &live);
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
            let rules = well_known(&id(kind, "a"), &live);
            assert!(rules.iter().any(|rule| rule.covers(pointer)), "{kind}");
            assert!(
                !rules.iter().any(|rule| rule.covers("/spec/group")),
                "{kind}"
            );
            assert!(well_known(&id(kind, "a"), &json!({})).is_empty(), "{kind}");
        }
    }
}
