//! Merge patches and server-side apply.

use std::sync::Arc;

use serde_json::Value;

use crate::cause::Cause;
use crate::managed;
use crate::meta;
use crate::objects::{self, DecodedUpdate};
use crate::request::{ApiRequest, go_type};
use crate::server::ApiServer;
use crate::status::{Failure, Outcome};
use crate::write::Write;

fn check_patch_options(request: &ApiRequest<'_>) -> Outcome<()> {
    let is_apply = request.content_type.starts_with("application/apply-patch");
    if !is_apply && !request.query.get("force").is_empty() {
        let cause = Cause::forbidden("force", "may not be specified for non-apply patch");
        return Err(Failure::invalid_options("PatchOptions", &[cause]));
    }
    Ok(())
}

impl ApiServer {
    pub(crate) fn patch(
        &mut self,
        request: &ApiRequest<'_>,
        write: Write,
    ) -> Outcome<(Arc<Value>, u16)> {
        check_patch_options(request)?;
        match request.media_type() {
            "application/merge-patch+json" => self.merge_patch(request, &write),
            "application/apply-patch+yaml" => self.apply_patch(request, write),
            "application/json-patch+json" => Err(Failure::not_modelled("JSON patches")),
            "application/strategic-merge-patch+json" if !write.kind.is_custom() => {
                Err(Failure::not_modelled("strategic merge patches"))
            }
            _ => Err(Failure::unsupported_patch()),
        }
    }

    fn merge_patch(
        &mut self,
        request: &ApiRequest<'_>,
        write: &Write,
    ) -> Outcome<(Arc<Value>, u16)> {
        let patch: Value = serde_json::from_slice(request.body)
            .map_err(|_| Failure::bad_request("invalid JSON patch"))?;
        if !patch.is_object() {
            let problem = format!(
                "error decoding patch: json: cannot unmarshal {} into Go value of type map[string]interface {{}}",
                go_type(&patch)
            );
            return Err(Failure::bad_request(problem));
        }
        let Some(previous) = self.store.get(&write.key()).cloned() else {
            return Err(Failure::not_found(&write.kind, &write.name));
        };
        let patched = || {
            let mut next = (*previous).clone();
            if write.kind.group == "events.k8s.io" {
                crate::render::to_served_event(&mut next);
            }
            next["apiVersion"] = write.kind.api_version().into();
            json_patch::merge(&mut next, &patch);
            next
        };
        let next = patched();
        check_patched(write, &next)?;
        // The server encodes the patched object and decodes it again.
        let update = DecodedUpdate::decode(write, &previous, next).map_err(|failure| {
            let text = failure.message();
            let problem = text.split_once(": ").map_or(text, |(_, problem)| problem);
            Failure::undecodable_patch(&patched(), problem)
        })?;
        if write.field_validation == "Strict" && !update.unknown.is_empty() {
            let problem = objects::strict_problem(&update.unknown);
            return Err(Failure::undecodable_patch(&patched(), &problem));
        }
        objects::check_version(write, &previous, &update.next)?;
        Ok((self.write_update(write, &previous, update)?, 200))
    }

    fn apply_patch(
        &mut self,
        request: &ApiRequest<'_>,
        mut write: Write,
    ) -> Outcome<(Arc<Value>, u16)> {
        if request.query.get("fieldManager").is_empty() {
            let cause = Cause::required("fieldManager", "is required for apply patch");
            return Err(Failure::invalid_options("PatchOptions", &[cause]));
        }
        let configuration = request.configuration()?;
        check_configuration(&write, &configuration)?;
        write.is_apply = true;
        let live = self.store.get(&write.key()).cloned();
        let force = request.query.is_true("force");
        let uid = meta::text(&configuration, "uid");
        if live.is_none() && !uid.is_empty() {
            let cause = format!(
                "uid mismatch: the provided object specified uid {uid}, and no existing object was found"
            );
            return Err(Failure::conflict(&write.kind, &write.name, &cause));
        }
        match live {
            Some(live) => {
                let next = managed::apply(&write, Some(&live), &configuration, force)?;
                Ok((self.update(&write, &live, next)?, 200))
            }
            None if !write.subresource.is_empty() => {
                Err(Failure::not_found(&write.kind, &write.name))
            }
            None => {
                let next = managed::apply(&write, None, &configuration, force)?;
                Ok((self.create(write, next)?, 201))
            }
        }
    }
}

fn check_patched(write: &Write, next: &Value) -> Outcome<()> {
    let namespace = meta::text(next, "namespace");
    if write.kind.namespaced && namespace != write.namespace {
        let message =
            "the namespace of the provided object does not match the namespace sent on the request";
        return Err(Failure::bad_request(message));
    }
    objects::check_identity(write, next)?;
    let kind = next["kind"].as_str().unwrap_or_default();
    if kind != write.kind.kind || next["apiVersion"] != write.kind.api_version() {
        return Err(match write.kind.is_custom() {
            true => Failure::changed_kind(&write.kind, kind, &write.name),
            false => {
                let version = next["apiVersion"].as_str().unwrap_or_default();
                let problem = format!("no kind {kind:?} is registered for version {version:?}");
                Failure::undecodable_patch(next, &problem)
            }
        });
    }
    Ok(())
}

/// Rejects a configuration whose kind differs or is missing.
fn check_configuration(write: &Write, configuration: &Value) -> Outcome<()> {
    let text = |field: &str| configuration[field].as_str().unwrap_or_default();
    let (version, kind) = (text("apiVersion"), text("kind"));
    if kind != write.kind.kind {
        let (group, version) = version.split_once('/').unwrap_or(("", version));
        let message = format!("invalid object type: {group}/{version}, Kind={kind}");
        return Err(Failure::bad_request(message));
    }
    let name = meta::name(configuration);
    if !name.is_empty() && name != write.name {
        return Err(objects::name_mismatch(name, &write.name));
    }
    Ok(())
}
