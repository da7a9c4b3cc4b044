//! Completes the generated CRDs: label, annotations and normalized schemas.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};

use crate::{HELM_KEEP_POLICY, SCHEMA_VERSION, SCHEMA_VERSION_ANNOTATION};

pub(crate) fn published(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    let label = ("app.kubernetes.io/part-of".to_owned(), "krypton".to_owned());
    crd.metadata.labels.get_or_insert_default().extend([label]);
    let version = (
        SCHEMA_VERSION_ANNOTATION.to_owned(),
        SCHEMA_VERSION.to_string(),
    );
    crd.metadata
        .annotations
        .get_or_insert_default()
        .extend([version, HELM_KEEP_POLICY.map(str::to_owned).into()]);
    let schemas = crd
        .spec
        .versions
        .iter_mut()
        .filter_map(|version| version.schema.as_mut());
    for schema in schemas.filter_map(|schema| schema.open_api_v3_schema.as_mut()) {
        normalize(schema);
    }
    crd
}

/// Normalizes a generated schema. The derive makes every `Option` nullable. If a field is not nullable, the API server
/// drops a `null`, which then means "not set" to rules and clients. Kubernetes warns about unsigned formats.
/// Descriptions contain the line breaks of the source.
fn normalize(schema: &mut JSONSchemaProps) {
    schema.nullable = None;
    schema.title = None;
    schema.description = schema
        .description
        .take()
        .map(|text| text.replace('\n', " "));
    if schema
        .format
        .as_deref()
        .is_some_and(|format| format.starts_with("uint"))
    {
        schema.format = Some("int64".to_owned());
    }
    schema
        .properties
        .iter_mut()
        .flat_map(|properties| properties.values_mut())
        .for_each(normalize);
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &mut schema.items {
        normalize(items);
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &mut schema.additional_properties {
        normalize(values);
    }
}
