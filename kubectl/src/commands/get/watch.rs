//! `kubectl krypton get … --watch`: the existing objects, then each change, until Ctrl-C.

use std::collections::BTreeMap;
use std::io::Write;

use futures::{StreamExt as _, TryStreamExt as _};
use krypton_runtime::call::ApiError;
use krypton_runtime::clock;
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};

use crate::commands::get::{Get, to_table};
use crate::error::KubectlError;
use crate::objects::{Objects, sort_by_name};
use crate::output::{OutputFormat, print_now};

/// Shown version of each object, by namespace and name. After a relist, the command shows only changed objects.
#[derive(Debug, Default)]
struct PrintedVersions(BTreeMap<(Option<String>, String), Option<String>>);

impl PrintedVersions {
    /// Returns whether this version of the object is new.
    fn is_new(&mut self, object: &DynamicObject) -> bool {
        let key = (object.namespace(), object.name_any());
        let version = object.resource_version();
        self.0.insert(key, version.clone()) != Some(version)
    }

    fn remove(&mut self, object: &DynamicObject) {
        self.0.remove(&(object.namespace(), object.name_any()));
    }
}

/// Prints changes until the reader closes `out`.
pub(crate) async fn run(
    get: &Get,
    name: Option<&str>,
    objects: Objects<DynamicObject>,
    out: &mut dyn Write,
) -> Result<(), KubectlError> {
    let mut config = watcher::Config::default();
    if let Some(name) = name {
        config = config.fields(&format!("metadata.name={name}"));
    }
    if let Some(labels) = &get.selector {
        config = config.labels(labels);
    }
    let mut events = watcher(objects.api.clone(), config)
        .default_backoff()
        .boxed();
    let (mut printed, mut initial) = (PrintedVersions::default(), Vec::new());
    let mut widths = Vec::new();
    let (mut is_listed, mut is_failing) = (false, false);
    loop {
        let event = match events.try_next().await {
            Ok(Some(event)) => event,
            Ok(None) => return Ok(()),
            Err(error) => {
                let Some((error, is_permanent)) = watch_error(error, &objects) else {
                    continue;
                };
                if is_permanent || !is_listed {
                    return Err(error);
                }
                if !is_failing {
                    eprintln!("{error}; retrying");
                    is_failing = true;
                }
                continue;
            }
        };
        let objects_to_print = match event {
            Event::Init => {
                initial.clear();
                continue;
            }
            Event::InitApply(object) => {
                if printed.is_new(&object) {
                    initial.push(object);
                }
                continue;
            }
            Event::InitDone => {
                is_listed = true;
                let mut listed = std::mem::take(&mut initial);
                sort_by_name(&mut listed);
                listed
            }
            Event::Apply(object) if printed.is_new(&object) => vec![object],
            Event::Apply(_) => continue,
            // The last state of a deleted object, as kubectl shows it.
            Event::Delete(object) => {
                printed.remove(&object);
                vec![object]
            }
        };
        is_failing = false;
        let text = format_changes(get, &objects, objects_to_print, &mut widths)?;
        if !print_now(out, &text)? {
            return Ok(());
        }
    }
}

/// Returns the error, and whether retrying cannot help: a missing permission or kind does not appear, but an API server
/// recovers. Returns `None` if the watch only ended.
fn watch_error(
    error: watcher::Error,
    objects: &Objects<DynamicObject>,
) -> Option<(KubectlError, bool)> {
    let (verb, source) = match error {
        watcher::Error::InitialListFailed(source) => ("list", source),
        watcher::Error::WatchStartFailed(source) | watcher::Error::WatchFailed(source) => {
            ("watch", source)
        }
        _ => return None,
    };
    let attempt = objects.attempt(verb, "").into();
    let source = Box::new(source);
    let error = ApiError::Failed { attempt, source };
    let is_permanent = matches!(error.code(), Some(400 | 401 | 403 | 404));
    Some((objects.call_error(verb, "", error), is_permanent))
}

/// Formats changed objects as rows of one continuing table, or as documents.
fn format_changes(
    get: &Get,
    objects: &Objects<DynamicObject>,
    changed: Vec<DynamicObject>,
    widths: &mut Vec<usize>,
) -> Result<String, KubectlError> {
    let changed: Vec<_> = changed.into_iter().map(|it| objects.to_value(it)).collect();
    if get.has_format(OutputFormat::Name) {
        return Ok(changed.iter().map(|it| objects.name_line(it)).collect());
    }
    let Some(output) = get.document() else {
        return Ok(match changed.as_slice() {
            [] => String::new(),
            _ => to_table(get, &changed, clock::wall()).render_below(widths),
        });
    };
    let separator = match get.has_format(OutputFormat::Yaml) {
        true => "---\n",
        false => "",
    };
    let mut text = String::new();
    for object in &changed {
        text += separator;
        text += &output.encode(object)?;
    }
    Ok(text)
}
