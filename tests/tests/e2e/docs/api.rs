//! The API pages: the fields of each kind, from the schema in its CRD.

use std::{collections::BTreeSet, fs};

use serde_json::Value;

use super::generated::{check, code, sentence, table};
use crate::docs_commands::pages::root;

const KINDS: [&str; 3] = ["edgecluster", "kryptondeployment", "tenant"];

/// Descriptions of fields for which the schema has none, with the end of the field's path.
const DESCRIPTIONS: [(&str, &str); 27] = [
    ("account.displayName", "Display name, for people"),
    ("account.owner", "Owner, for people"),
    ("region.name", "Name of the region"),
    ("clusterProfileRef.name", "Name of the ClusterProfile"),
    (
        "clusterProfileRef.namespace",
        "Namespace of the ClusterProfile",
    ),
    ("secret.name", "Name of the Secret"),
    ("sourceRef.name", "Name of the object or file"),
    ("sourceRef.namespace", "Namespace of the object"),
    ("namespaceConfiguration.labels", "Labels by key"),
    ("namespaceConfiguration.annotations", "Annotations by key"),
    (
        "nextSteps[].cluster",
        "The cluster, as in the type of its conditions",
    ),
    ("agentVersion", "Version of the member's agent"),
    ("kubernetesVersion", "Version of the member's API server"),
    (
        "conditions",
        "Conditions `TargetClusterResolved` and `Ready`",
    ),
    ("summary.error", "Clusters with an error"),
    ("summary.notReady", "Clusters that are not ready"),
    ("summary.ready", "Clusters that are ready"),
    ("summary.unknown", "Clusters whose state is unknown"),
    ("[].name", "Name of the object"),
    ("[].namespace", "Namespace of the object"),
    ("tenants.error", "Tenants in phase `Error`"),
    ("tenants.pending", "Tenants in phase `Pending`"),
    ("tenants.ready", "Tenants in phase `Ready`"),
    ("tenants.total", "All Tenants"),
    (".epoch", "Epoch of the hub that issued the desired state"),
    (
        ".generation",
        "Number of the desired state within its epoch",
    ),
    (".digest", "Digest of the desired state"),
];

/// Returns the CRD of a kind.
fn crd(kind: &str) -> Value {
    let path = root().join(format!("crds/crds/{kind}s.mesh.openkcm.io.yaml"));
    serde_saphyr::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

/// Rows of a table, and the entries of [`DESCRIPTIONS`] that they use.
#[derive(Default)]
struct Fields {
    rows: Vec<[String; 4]>,
    used: BTreeSet<&'static str>,
    undescribed: Vec<String>,
}

impl Fields {
    fn add(&mut self, path: &str, schema: &Value, is_required: bool) {
        let is_conditions = path == "conditions";
        let mut description = sentence(self.description(path, schema));
        for limit in limits(schema, &description) {
            description = format!("{description} {limit}");
        }
        if is_conditions {
            description += " Each has the fields of a Kubernetes condition.";
        }
        let default = match (&schema["default"], is_required) {
            (Value::Null, true) => "required".to_owned(),
            (Value::Null, false) => String::new(),
            (value, _) => code(&value.to_string()),
        };
        let cells = [code(path), kind_of(schema), default, description];
        self.rows.push(cells.map(|cell| cell.trim().to_owned()));
        if !is_conditions {
            self.descend(path, schema);
        }
    }

    fn descend(&mut self, path: &str, schema: &Value) {
        let (prefix, schema) = match schema["items"].is_object() {
            true => (format!("{path}[]."), &schema["items"]),
            false => (format!("{path}."), schema),
        };
        let required: BTreeSet<&str> = schema["required"]
            .as_array()
            .map(|names| names.iter().filter_map(Value::as_str).collect())
            .unwrap_or_default();
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            let path = format!("{prefix}{name}");
            let path = path.trim_start_matches('.');
            self.add(path, field, required.contains(name.as_str()));
        }
    }

    fn description<'a>(&mut self, path: &str, schema: &'a Value) -> &'a str {
        let own = text(schema, "description");
        if !own.is_empty() {
            return own;
        }
        let of_items = text(&schema["items"], "description");
        let known = DESCRIPTIONS
            .iter()
            .find(|(end, _)| path == *end || path.ends_with(end));
        match known {
            _ if !of_items.is_empty() => of_items,
            Some((end, description)) => {
                self.used.insert(end);
                description
            }
            None => {
                self.undescribed.push(path.to_owned());
                ""
            }
        }
    }
}

fn kind_of(schema: &Value) -> String {
    let items = &schema["items"];
    let values = &schema["additionalProperties"];
    match (text(schema, "type"), text(schema, "format")) {
        ("array", _) => format!("list of {}s", kind_of(items)),
        ("object", _) if values.is_object() => format!("map of {}s", kind_of(values)),
        ("string", "date-time") => "time".to_owned(),
        (kind, _) => kind.to_owned(),
    }
}

/// Returns the limits of a field that its description leaves out.
fn limits(schema: &Value, description: &str) -> Vec<String> {
    let mut limits = Vec::new();
    let values = schema["enum"].as_array().into_iter().flatten();
    let values: Vec<String> = values.filter_map(Value::as_str).map(code).collect();
    if values.iter().any(|value| !description.contains(value)) {
        limits.push(format!("One of {}.", values.join(", ")));
    }
    for (key, of) in [
        ("maxLength", "characters"),
        ("maxProperties", "entries"),
        ("maxItems", "entries"),
    ] {
        if let Some(most) = schema[key].as_u64() {
            limits.push(format!("At most {most} {of}."));
        }
    }
    limits.extend(rules(schema));
    limits
}

/// Returns the messages with which the API server rejects an object.
fn rules(schema: &Value) -> Vec<String> {
    let rules = schema["x-kubernetes-validations"].as_array();
    let messages = rules
        .into_iter()
        .flatten()
        .map(|rule| text(rule, "message"));
    messages
        .map(|message| format!("Rule: {}", sentence(message)))
        .collect()
}

/// Returns the generated part of a kind's page.
fn part(kind: &str, used: &mut BTreeSet<&'static str>) -> String {
    let crd = crd(kind);
    let version = &crd["spec"]["versions"][0];
    let schema = &version["schema"]["openAPIV3Schema"];
    let names = &crd["spec"]["names"];
    let columns = version["additionalPrinterColumns"].as_array().unwrap();
    let columns = |is_wide: bool| {
        let shown = columns
            .iter()
            .filter(|column| column["priority"].is_u64() == is_wide);
        shown
            .map(|column| text(column, "name"))
            .collect::<Vec<_>>()
            .join(", ")
    };
    let mut part = format!(
        "{}\n\n- API version: `{}/{}`\n- Short name: `{}`\n- Scope: {}\n- Columns: {}. With `-o wide` also: {}\n",
        text(schema, "description"),
        text(&crd["spec"], "group"),
        text(version, "name"),
        names["shortNames"][0].as_str().unwrap_or_default(),
        text(&crd["spec"], "scope"),
        columns(false),
        columns(true),
    );
    for name in ["spec", "status"] {
        let schema = &schema["properties"][name];
        let mut fields = Fields::default();
        fields.descend("", schema);
        assert!(
            fields.undescribed.is_empty(),
            "{kind}: {:?}",
            fields.undescribed
        );
        used.extend(&fields.used);
        let head = ["Field", "Type", "Default", "Description"];
        part += &format!(
            "\n## Fields of `{name}`\n\n{}\n",
            sentence(text(schema, "description"))
        );
        part += &format!("\n{}", table(head, &fields.rows));
        for rule in rules(schema) {
            part += &format!("\n{rule}\n");
        }
    }
    for rule in rules(schema) {
        part += &format!("\n{rule}\n");
    }
    part
}

#[test]
fn docs_api_pages_are_current() -> Result<(), String> {
    let mut used = BTreeSet::new();
    for kind in KINDS {
        check(&format!("api/{kind}.md"), &part(kind, &mut used))?;
    }
    let unused: Vec<&str> = DESCRIPTIONS
        .into_iter()
        .map(|(end, _)| end)
        .filter(|end| !used.contains(end))
        .collect();
    assert!(unused.is_empty(), "the schema describes these: {unused:?}");
    Ok(())
}
